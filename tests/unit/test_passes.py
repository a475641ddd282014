"""`Passes`: backward passes are counted until a step is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commlayer.frontend.gradients.passes import Passes


class Watched:
    """A model with a record of what `Passes` has told."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        self.told: list[str] = []
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        self.passes = Passes(
            list(names),
            lambda: self.told.append("begun"),
            lambda parameter: self.told.append(names[parameter]),
            lambda: self.told.append(f"ended {self.passes.count}"),
        )

    def backward(self) -> None:
        self.told.clear()
        self.model(torch.ones(1, 3)).sum().backward()


def test_each_gradient_is_told_between_begin_and_end() -> None:
    watched = Watched()
    watched.backward()
    assert watched.told[0] == "begun"
    assert sorted(watched.told[1:-1]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert watched.told.index("1.weight") < watched.told.index("0.weight")
    assert watched.told[-1] == "ended 1"
    watched.passes.remove()
    watched.backward()
    assert not watched.told


@pytest.mark.parametrize("between", ["nothing", "step", "zero_grad", "zeros"])
def test_passes_are_counted_until_a_step_or_zero_grad(between: str) -> None:
    watched = Watched()
    watched.backward()
    if between == "step":
        watched.passes.stepped()
    elif between != "nothing":
        watched.model.zero_grad(set_to_none=between == "zero_grad")
    watched.backward()
    assert watched.told[-1] == f"ended {2 if between == 'nothing' else 1}"


def test_a_pass_without_these_parameters_is_none() -> None:
    watched = Watched()
    nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
    torch.autograd.grad(watched.model(torch.ones(1, 3)).sum(), list(watched.model.parameters()))
    assert not watched.told
    assert watched.passes.count == 0


def test_a_pass_that_fails_ends_with_the_step() -> None:
    watched = Watched()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("stop")

    hook = next(watched.model.parameters()).register_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        watched.backward()
    hook.remove()
    watched.passes.stepped()
    watched.backward()
    assert (watched.told[0], watched.told[-1]) == ("begun", "ended 1")
