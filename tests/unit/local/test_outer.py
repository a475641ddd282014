"""The outer optimizer is torch's SGD with Nesterov momentum; its default follows the trials of docs/local.md."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.frontend.local.outer import Outer
from commlayer.frontend.local.turns import Turns


@given(st.floats(0.01, 2.0), st.floats(0.0, 0.99), st.integers(0, 2**16))
def test_it_is_torchs_sgd_with_nesterov_momentum(lr: float, momentum: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = torch.zeros(50, dtype=torch.float64)
    theirs = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=momentum > 0)
    outer, buffer = Outer.of((lr, momentum)), torch.zeros(50, dtype=torch.float64)
    for _ in range(4):
        average = torch.randn(50, dtype=torch.float64, generator=generator)
        theirs.grad = -average
        optimizer.step()
        ours += outer.change(average, buffer)
    assert torch.allclose(ours, theirs.detach(), rtol=1e-9)


def test_averaging_returns_the_average_itself() -> None:
    average = torch.randn(10)
    assert torch.equal(Outer(1.0, 0.0).change(average, torch.zeros(0)), average)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (Turns(10, 1, 0), (1, 0)),
        (Turns(24, 1, 0), (0.7, 0.9)),
        (Turns(24, 4, 6), (0.7, 0.6)),
        (Turns(4, 4, 1), (0.7, 0.6)),
        (Turns(8, 2, 4), (1, 0)),
        (Turns(24, 1, 9), (1, 0)),
        (Turns(26, 4, 7), (0.7, 0.6)),
        (Turns(25, 1, 7), (1, 0)),
        (Turns(1, 1, 0), (1, 0)),
    ],
)
def test_default(turns: Turns, expected: tuple[float, float]) -> None:
    assert Outer.default(turns) == expected


@pytest.mark.parametrize("given", [0.7, (0.7,), (0, 0.9), (1, 1), (1, -0.1), ("1", 0), (float("nan"), 0), (3, 0)])
def test_values_out_of_range_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="LocalSteps\\(outer="):
        Outer.of(given)
