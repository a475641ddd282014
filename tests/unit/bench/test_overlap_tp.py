"""The tables of tensor parallelism in docs/overlap.md: model, ratios, targets, quantiles."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import overlap_tp
from bench.harness.turns import slowed
from bench.jobs.tensor_parallel import BATCH, INT8, OURS, SERIAL, WEIGHTS, WeightsLayer
from bench.overlap_tp import (
    ALONE,
    FORWARD_S,
    IDLE,
    MIXED,
    MIXED_ONE_CLASS,
    ONE_CLASS,
    PRIORITY,
    REDUCE,
    Job,
)
from commlayer.tools.bench import machine
from commlayer.tools.emulate.scenario import Scenario


def logs(step_s: dict[str, list[float]], busy: float = 0.1) -> list[dict[str, Any]]:
    rounds = zip(*([(name, value) for value in values] for name, values in step_s.items()), strict=True)
    return [
        {"job": dataclasses.asdict(Job(name)), "step_s": [value] * 3, "busy": busy}
        for values in rounds
        for name, value in values
    ]


def content(**cases: Any) -> dict[str, Any]:
    steps = logs({SERIAL: [1.5, 1.5, 1.5], WEIGHTS: [1.2, 1.3, 1.2], OURS: [1.0, 1.0, 1.1]})
    network = Scenario.read(overlap_tp.SCENARIO).table
    return {
        "network": network,
        "width": 100,
        "steps": steps,
        "machine": machine.facts(),
        "measured": "2026-01-01",
        **cases,
    }


def test_the_model_has_the_limits_of_arithmetic() -> None:
    serial, weights, ours = (overlap_tp.ideal_s(system, 1.0) for system in (SERIAL, WEIGHTS, OURS))
    assert (serial, weights, ours) == (24.0, 20.0, 15.25)  # 6.5 forward, bound by links; 8.75 backward, by computation
    assert serial / ours == pytest.approx(overlap_tp.TARGETS[SERIAL][1], abs=0.005)
    assert weights / ours == pytest.approx(overlap_tp.TARGETS[WEIGHTS][1], abs=0.005)


def test_int8_is_compared_with_dtensor() -> None:
    serial, int8 = (overlap_tp.ideal_s(system, 1.0) for system in (SERIAL, INT8))
    assert int8 == pytest.approx(12 + REDUCE * 1.03125 / 4, rel=1e-3)  # the last part's two all-reduces are exposed
    assert serial / int8 == pytest.approx(overlap_tp.INT8_TARGET[1], abs=0.005)
    steps = logs({SERIAL: [1.5, 1.5], WEIGHTS: [1.2, 1.2], OURS: [1.0, 1.0], INT8: [0.8, 0.9]})
    last = overlap_tp.steps_table(content(steps=steps)).splitlines()[5]
    assert last.startswith(
        "| tp.overlap, int8 | 850 (800 to 900) | 743 | 10% | DTensor / step 1.771 (1.667 to 1.875) |"
    )
    assert last.endswith("| ≥ 1.75 (limit 1.94) | yes |")
    slow = overlap_tp.steps_table(content(steps=logs({SERIAL: [1.5], WEIGHTS: [1.2], OURS: [1.0], INT8: [0.9]})))
    assert slow.splitlines()[5].endswith("| **no** |")


def test_an_all_reduce_takes_its_share_of_a_step() -> None:
    scenario = dataclasses.replace(Scenario.read(overlap_tp.SCENARIO), hosts=2)
    assert scenario.payload_gb_s is not None
    sent = 4 * BATCH * overlap_tp.width_of(scenario, FORWARD_S)
    assert sent / (scenario.payload_gb_s * 1e9) == pytest.approx(1.5 * FORWARD_S, rel=0.01)


def test_steps_have_ratios_and_targets() -> None:
    rows = overlap_tp.steps_table(content()).splitlines()
    assert rows[2].startswith(
        "| DTensor | 1500 (1500 to 1500) | 1440 | 10% | 1.500 (1.364 to 1.500) | ≥ 1.45 (limit 1.57) | yes |"
    )
    assert "| 1.200 (1.091 to 1.300) | (limit 1.31) |  |" in rows[3]
    assert "| 915 | 10% | model / step 0.915 (0.832 to 0.915) | model / step ≥ 0.90 | yes |" in rows[4]
    void = overlap_tp.steps_table(content(steps=logs({SERIAL: [1.5], WEIGHTS: [1.2], OURS: [1.0]}, 0.3)))
    assert void.count("**void**") == 3
    assert void.count("| void |") == 2


def test_latency_is_judged_beside_gradients_with_priority() -> None:
    table = overlap_tp.latency_table(
        content(latency=logs({IDLE: [0.010, 0.010], PRIORITY: [0.014, 0.014], ONE_CLASS: [0.5, 0.6]}))
    )
    rows = table.splitlines()
    assert "| 14.0 (14.0 to 14.0) | 1.40 (1.40 to 1.40) | ≤ 1.5: yes | 14.0 (14.0 to 14.0)" in rows[3]
    assert "| ≤ 2.0: yes |" in rows[3]
    assert "yes" not in rows[4]
    slow = logs({IDLE: [0.010], PRIORITY: [0.021], ONE_CLASS: [0.5]})
    assert overlap_tp.latency_table(content(latency=slow)).count("**no**") == 2


def test_a_quantile_is_the_smallest_value_that_has_its_share() -> None:
    values = list(range(1, 101))
    assert overlap_tp.quantile(values, 0.5) == 50
    assert overlap_tp.quantile(values, 0.99) == 99
    assert overlap_tp.quantile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_a_mixed_step_is_compared_with_its_bound() -> None:
    bound = 4 * 3.5 * FORWARD_S  # of all communication
    found = logs({ALONE: [0.95, 0.8], MIXED: [1.0, 1.05 * bound], MIXED_ONE_CLASS: [1.2, 1.2]})
    rows = overlap_tp.mixed_table(content(mixed=found)).splitlines()
    assert "(1.050 to 1.053) | ≤ 1.10: yes |" in rows[3]
    assert rows[4].endswith("|  |")


def test_the_mixed_case_has_a_network_and_a_pace_of_its_own() -> None:
    slow = slowed(Scenario.read(overlap_tp.SCENARIO), overlap_tp.MIXED_SLOWER)
    found = logs({ALONE: [2.0], MIXED: [2.1], MIXED_ONE_CLASS: [2.2]})
    for log in found:
        log["job"]["forward_s"] = FORWARD_S * overlap_tp.MIXED_SLOWER
    table = overlap_tp.mixed_table(content(mixed=found, mixed_network=slow.table))
    assert "NIC 0: 20 Mbit/s" in table
    assert "layers of 150 ms. All communication of a step takes 2100 ms" in table
    assert "NIC 0: 50 Mbit/s" in overlap_tp.mixed_table(content(mixed=found))  # of results from before


def test_the_picture_has_both_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_tp, "PICTURE", tmp_path / "steps.svg")
    overlap_tp.picture(content(mixed=logs({ALONE: [0.9], MIXED: [1.0], MIXED_ONE_CLASS: [1.2]})))
    drawn = (tmp_path / "steps.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in (SERIAL, OURS, ALONE, MIXED))


def test_the_peers_layer_has_the_gradients_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        def wait(self) -> None: ...

    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Work())
    torch.manual_seed(1)
    layer, x = WeightsLayer(6, 0.0), torch.randn(BATCH, 6, requires_grad=True)
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad(layer(x).square().sum(), leaves)
    plain = x + layer.down(torch.relu(layer.up(layer.norm(x))))
    torch.testing.assert_close(found, torch.autograd.grad(plain.square().sum(), leaves))
