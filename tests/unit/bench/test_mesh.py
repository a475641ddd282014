"""The table of 3-D tensor parallelism beside 1-D and FSDP: bytes by formula, ratios, and what is to be shown."""

import dataclasses
from typing import Any

import pytest
import torch

from bench import mesh
from bench.mesh import AT, LIMIT, ONE, SHARDED, THREE, TOKENS, WIDTH, Job, Layer, received_bytes
from commlayer.tools.bench import machine


def content(**step_s: tuple[float, float, float]) -> dict[str, Any]:
    runs = [
        {"job": dataclasses.asdict(Job(system, tokens)), "step_s": [value] * 2, "busy": 0.1}
        for tokens, values in zip(TOKENS, step_s.values(), strict=True)
        for system, value in zip((ONE, SHARDED, THREE), values, strict=True)
    ]
    return {"runs": runs, "network": mesh.network(1).table, "machine": machine.facts(), "measured": "2026-01-01"}


def test_the_bytes_say_when_3d_wins() -> None:
    h = WIDTH
    assert received_bytes(ONE, TOKENS[AT]) == 7 * TOKENS[AT] * h * 4
    assert received_bytes(SHARDED, TOKENS[AT]) == 31.5 * h * h * 4
    assert received_bytes(THREE, TOKENS[AT]) == (4 * TOKENS[AT] * h + 3 * h * h) * 4
    ratios = {
        tokens: min(received_bytes(system, count) for system in (ONE, SHARDED)) / received_bytes(THREE, count)
        for tokens, count in TOKENS.items()
    }
    assert ratios == {"h / 2": pytest.approx(0.7), "4.5 h": pytest.approx(LIMIT), "15 h": pytest.approx(0.5)}


def test_each_row_is_judged_by_the_better_of_the_others() -> None:
    rows = mesh.table(content(a=(0.4, 3.0, 0.5), b=(2.0, 2.1, 1.4), c=(5.0, 2.0, 3.0))).splitlines()[2:5]
    assert rows[0].endswith("| 0.80 (0.80 to 0.80) | 0.70 | below 1 | yes |")
    assert rows[1].endswith("| 1.43 (1.43 to 1.43) | 1.50 | ≥ 1.35 (limit 1.50) | yes |")
    assert rows[2].endswith("| 0.67 (0.67 to 0.67) | 0.50 | below 1 | yes |")
    slow = mesh.table(content(a=(0.6, 3.0, 0.5), b=(1.8, 2.1, 1.4), c=(5.0, 2.0, 3.0)))
    assert slow.count("**no**") == 2


def test_the_layer_adds_up_neighbours() -> None:
    torch.manual_seed(1)
    layer, x = Layer(8), torch.randn(3, 8)
    weight = layer.get_parameter("qkv.weight").view(8, 3, 8).sum(1)
    inner = x + x @ weight.T @ layer.get_parameter("project.weight").T
    up, down = layer.get_parameter("up.weight"), layer.get_parameter("down.weight")
    torch.testing.assert_close(layer(x), inner + torch.relu(inner @ up.T) @ down.T)
