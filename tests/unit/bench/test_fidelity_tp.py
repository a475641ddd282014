"""Virtual tensor parallelism computes what the plain model does, and its table says what was shown."""

from typing import Any

import pytest
import torch

from bench import fidelity_tp
from bench.fidelity import CONTEXT, MODELS, SEEDS, STEPS, VALIDATE_AT
from bench.fidelity_tp import BASELINE, CONTROL, REVERSED, SYSTEMS, TESTED, Sums, System
from commlayer.tools.bench import machine
from examples.train_gpt import Gpt


@pytest.mark.parametrize(("system", "most"), [(BASELINE, 1e-5), (REVERSED, 1e-5), (TESTED, 0.05), (CONTROL, 0.6)])
def test_outputs_and_gradients_are_those_of_the_plain_model(system: System, most: float) -> None:
    torch.manual_seed(1)
    model = MODELS["byte GPT"]()
    assert isinstance(model, Gpt)
    text = torch.randint(256, (2, CONTEXT))
    parameters = list(model.parameters())
    exact = model(text)
    of_exact = torch.autograd.grad(exact.square().mean(), parameters)
    found = fidelity_tp.logits_of(model, text, Sums(system))
    of_found = torch.autograd.grad(found.square().mean(), parameters)
    least = 0.0 if system.codec is None else most / 100
    assert least <= float((found - exact).detach().norm() / exact.detach().norm()) < most
    whole, other = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in (of_exact, of_found))
    assert float((whole - other).norm() / whole.norm()) < most


def content(count: int, **differences: float) -> dict[str, Any]:
    runs: list[dict[str, Any]] = [
        {
            "seed": seed,
            "system": system.name,
            "losses": {str(at): 2 + seed / 10 + differences.get(system.name, 0) + seed % 2 / 1e4 for at in VALIDATE_AT},
        }
        for seed in SEEDS[:count]
        for system in SYSTEMS
    ]
    for run in runs:
        if run["system"] == BASELINE.name:
            run["losses"] = {str(at): 2 + run["seed"] / 10 for at in VALIDATE_AT}
    about = machine.facts()
    return {"runs": runs, "measured": "2026-01-01", "machine": about}


def test_the_table_says_what_was_shown() -> None:
    lines = fidelity_tp.table(content(12, int8=0.001, int4=0.02)).splitlines()
    assert lines[3].startswith("| int8 | +0.0010 | +0.0010 | +0.0010 |")
    assert lines[3].endswith("| equivalent |")
    assert lines[4].endswith("| differs |")
    assert "12 seeds. Loss with f32: 2.100 to 3.200" in lines[-1]
    weak = fidelity_tp.table(content(12)).splitlines()
    assert weak[4].endswith("| **equivalent: the test has no force** |")
    assert "so far" in fidelity_tp.table(content(3))
    assert fidelity_tp.table(content(3)).count("| open |") == len(SYSTEMS) - 1
    assert fidelity_tp.table(content(1)) == "1 of 12 seeds so far."


@pytest.mark.slow
def test_a_short_training_learns() -> None:
    first, last = (fidelity_tp.train(TESTED, 1, steps)["losses"][str(steps)] for steps in (1, 12))
    assert last < first - 0.3
    assert STEPS >= 1500
