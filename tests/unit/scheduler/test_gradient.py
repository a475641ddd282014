"""Gradients in flight: every use waits, and sees the values that arrived."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlayer.scheduler.gradient import PendingGradient, PendingReduction

VALUES = [3.0, -4.0, 12.0]


class Arrival:
    """A reduction that puts VALUES into the gradient when it is waited for."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.zeros(3))
        self.memory = torch.full((3,), torch.nan)
        self.waits = 0
        self.reduction = PendingReduction(self.wait, {self.parameter: self.memory})
        self.reduction.place()

    def wait(self) -> None:
        self.waits += 1
        self.memory.copy_(torch.tensor(VALUES))

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad


def saved(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda gradient: float(gradient.norm()) == 13.0,
    "view": lambda gradient: gradient.view(1, 3)[0, 1].item() == -4.0,
    "foreach": lambda gradient: float(torch._foreach_norm([gradient])[0]) == 13.0,
    "numpy": lambda gradient: gradient.numpy().tolist() == VALUES,
    "tolist": lambda gradient: gradient.tolist() == VALUES,
    "repr": lambda gradient: "12." in repr(gradient),
    "deepcopy": lambda gradient: copy.deepcopy(gradient).tolist() == VALUES,
    "detach": lambda gradient: type(gradient.detach()) is Tensor,
    "keyword": lambda gradient: torch.add(torch.zeros(3), other=gradient).tolist() == VALUES,
    "save": lambda gradient: saved(gradient).tolist() == VALUES,
}


@pytest.mark.parametrize("name", READS)
def test_reading_waits_once(name: str) -> None:
    arrival = Arrival()
    gradient = arrival.gradient
    assert isinstance(gradient, PendingGradient)
    assert (gradient.shape, gradient.dtype, gradient.requires_grad) == ((3,), torch.float32, False)
    assert arrival.waits == 0
    assert READS[name](gradient)
    assert READS[name](gradient)
    assert arrival.waits == 1
    assert arrival.gradient is arrival.memory


def test_its_address_is_that_of_the_gradient() -> None:
    arrival = Arrival()
    assert arrival.gradient.data_ptr() == arrival.memory.data_ptr()
    assert arrival.waits == 1


def test_changes_reach_the_gradient() -> None:
    arrival = Arrival()
    assert arrival.gradient.mul_(2).tolist() == [6.0, -8.0, 24.0]
    assert arrival.memory.tolist() == [6.0, -8.0, 24.0]


def test_clipping_is_exact() -> None:
    arrivals = [Arrival(), Arrival()]
    plain = [nn.Parameter(torch.zeros(3)) for _ in arrivals]
    for parameter in plain:
        parameter.grad = torch.tensor(VALUES)
    norm = nn.utils.clip_grad_norm_([arrival.parameter for arrival in arrivals], 1.0)
    assert norm == nn.utils.clip_grad_norm_(plain, 1.0)
    for arrival, parameter in zip(arrivals, plain, strict=True):
        assert parameter.grad is not None
        assert torch.equal(arrival.gradient, parameter.grad)
        assert type(arrival.gradient) is Tensor


def test_gradients_that_were_cleared_or_replaced_are_left_alone() -> None:
    arrival = Arrival()
    arrival.parameter.grad = None
    arrival.reduction.wait()
    assert arrival.parameter.grad is None
    arrival = Arrival()
    own = torch.ones(3)
    arrival.parameter.grad = own
    arrival.reduction.wait()
    assert arrival.parameter.grad is own


def test_a_failure_is_raised_at_every_use() -> None:
    def fail() -> None:
        raise ConnectionError("rank 1 is gone")

    parameter = nn.Parameter(torch.zeros(3))
    reduction = PendingReduction(fail, {parameter: torch.zeros(3)})
    reduction.place()
    for _ in range(2):
        with pytest.raises(ConnectionError, match="rank 1 is gone"):
            nn.utils.clip_grad_norm_([parameter], 1.0)
    assert not reduction.arrived


def test_what_is_there_already_needs_no_wait() -> None:
    parameter, gradient = nn.Parameter(torch.zeros(3)), torch.ones(3)
    reduction = PendingReduction(None, {parameter: gradient})
    assert reduction.arrived
    reduction.place()
    reduction.wait()
    assert parameter.grad is gradient
