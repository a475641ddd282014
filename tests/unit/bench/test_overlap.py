"""The table of docs/overlap.md: order of runs, interval, model, targets."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import overlap
from bench.harness.turns import slowed
from bench.jobs import data_parallel, ddp_model
from bench.jobs.data_parallel import DEAR, DEAR_GLOO, FIFO, GLOO, HOOKS, OURS, STOCK, SYSTEMS, Job
from commlayer.tools.bench import machine
from commlayer.tools.emulate.scenario import Scenario


def logs(step_s: dict[str, list[float]], busy: float = 0.1) -> list[dict[str, Any]]:
    rounds = zip(*([(name, value) for value in values] for name, values in step_s.items()), strict=True)
    return [
        {"job": dataclasses.asdict(Job(name)), "step_s": [value] * 3, "busy": busy}
        for values in rounds
        for name, value in values
    ]


def content(step_s: dict[str, list[float]], busy: float = 0.1) -> dict[str, Any]:
    scenario = Scenario.read(overlap.SCENARIO)
    return {
        "network": scenario.table,
        "width": overlap.width_of(scenario),
        "runs": logs(step_s, busy),
        "machine": machine.facts(),
        "measured": "2026-01-01",
    }


STEPS = {
    GLOO: [0.9, 0.88, 0.92],
    STOCK: [0.8, 0.81, 0.79],
    DEAR_GLOO: [0.78, 0.78, 0.78],
    DEAR: [0.77, 0.76, 0.75],
    HOOKS: [0.75, 0.76, 0.77],
    FIFO: [0.8, 0.81, 0.82],
    OURS: [0.7, 0.7, 0.7],
}


def test_communication_is_as_long_as_forward_and_backward() -> None:
    scenario = Scenario.read(overlap.SCENARIO)
    assert scenario.payload_gb_s is not None
    values = data_parallel.LAYERS * overlap.width_of(scenario) ** 2
    sent = 2 * (scenario.hosts - 1) / scenario.hosts * 4 * values
    assert sent / (scenario.payload_gb_s * 1e9) == pytest.approx(
        3 * data_parallel.FORWARD_S * data_parallel.LAYERS, rel=0.01
    )
    assert overlap.ideal_s(Job(STOCK)) / overlap.ideal_s(Job(OURS)) == pytest.approx(1.26, abs=0.005)
    slower = slowed(scenario, 2)
    assert overlap.width_of(slower, 2 * data_parallel.FORWARD_S) == overlap.width_of(scenario)
    assert slower.nics[0].rate_bps == 25e6


def test_the_table_has_ratios_targets_and_void_rows() -> None:
    rows = overlap.table(content(STEPS)).splitlines()
    assert "| 900 (880 to 920) | 850 |  |  | 10% | 1.286 (1.257 to 1.314) | ≥ 1.20 (limit 1.26) | yes |" in rows[2]
    assert rows[3].endswith("| ≥ 1.20 (limit 1.26) | **no** |")
    assert rows[5].startswith(f"| {DEAR} | 1 layers per bucket | 760 (750 to 770) | 762 |")
    assert rows[5].endswith("| (limit 1.13) |  |")
    assert rows[6].startswith(f"| {HOOKS} | 1 layers per bucket | 760 (750 to 770) | 850 |")
    assert rows[6].endswith("| ≥ 1.10 (limit 1.26) | **no** |")
    assert rows[8].startswith(f"| {OURS} | 1 layers per bucket | 700 (700 to 700) | 675 |  |  | 10% |")
    assert "**void**" not in overlap.table(content(STEPS))
    void = overlap.table(content(STEPS, busy=0.3))
    assert void.count("30% (**void**)") == len(SYSTEMS)
    assert void.count("| void |") == len(overlap.TARGETS)
    assert "| yes |" not in void
    assert "3 rounds (range)" in void


def test_the_model_is_judged_where_costs_were_measured() -> None:
    ideal = dataclasses.asdict(ddp_model.ideal(data_parallel.LAYERS, data_parallel.FORWARD_S))
    costs = {"gloo": ideal, "commlayer": {**ideal, "class_latency_s": 0.01}}
    rows = overlap.table({**content(STEPS), "costs": costs}).splitlines()
    assert "| 900 (880 to 920) | 850 | 850 | 1.059 (**no**) |" in rows[2]
    assert "| 700 (700 to 700) | 675 | 685 | 1.022 |" in rows[8]


def test_systems_without_results_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = content({GLOO: STEPS[GLOO], STOCK: STEPS[STOCK], OURS: STEPS[OURS]})
    assert len(overlap.table(kept).split("\n\n")[0].splitlines()) == 5
    monkeypatch.setattr(overlap, "PICTURE", tmp_path / "steps.svg")
    overlap.picture(kept)
    assert (tmp_path / "steps.svg").read_text().count("<svg") == 1


def test_a_layer_computes_and_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    layer = data_parallel.Layer(3, 0.5)
    layer(torch.ones(1, 3)).sum().backward()
    assert slept == [0.5, 1.0]
    assert layer.linear.weight.grad is not None
