"""Guarded parameters: each read or change calls the function first, and nothing else does."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlayer.scheduler.guard import Guarded, guard, others_hold, unguard

READS: dict[str, Callable[[Any], Any]] = {
    "operator": lambda tensor: tensor + 1,
    "method": lambda tensor: tensor.norm(),
    "in a list": lambda tensor: torch.cat([tensor, tensor]),
    "data": lambda tensor: tensor.data,
    "detach": lambda tensor: tensor.detach(),
    "data_ptr": lambda tensor: tensor.data_ptr(),
    "index": lambda tensor: tensor[0],
    "in place": lambda tensor: tensor.detach().zero_(),
    "deepcopy": copy.deepcopy,
    "save": lambda tensor: torch.save(tensor, io.BytesIO()),
    "repr": repr,
    "item": lambda tensor: tensor.sum().item(),
    "torch.ops": lambda tensor: torch.ops.aten.mm(tensor, tensor),
}

LOOKS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda tensor: (tensor.shape, tensor.dtype, tensor.device, tensor.ndim, tensor.size(), tensor.stride()),
    "gradient": lambda tensor: (tensor.grad, tensor.__setattr__("grad", torch.ones(2, 2)), tensor.__delattr__("grad")),
    "flags": lambda tensor: (tensor.requires_grad, tensor.is_leaf, tensor.grad_fn, isinstance(tensor, nn.Parameter)),
    "key": lambda tensor: {tensor: 1}[tensor],
}


def guarded() -> tuple[nn.Parameter, list[Tensor]]:
    parameter, seen = nn.Parameter(torch.ones(2, 2)), []

    def used(each: Tensor) -> None:
        seen.append(each)
        unguard(each)

    guard(parameter, used)
    return parameter, seen


@pytest.mark.parametrize("name", READS)
def test_reads_are_seen_once(name: str) -> None:
    parameter, seen = guarded()
    READS[name](parameter)
    assert len(seen) == 1
    assert seen[0] is parameter
    assert type(parameter) is nn.Parameter
    assert not vars(parameter)
    READS[name](parameter)
    assert len(seen) == 1


@pytest.mark.parametrize("name", LOOKS)
def test_looks_are_not(name: str) -> None:
    parameter, seen = guarded()
    LOOKS[name](parameter)
    assert isinstance(parameter, Guarded)
    assert not seen


def test_copies_are_not_guarded() -> None:
    parameter, _ = guarded()
    assert type(copy.deepcopy(parameter)) is nn.Parameter
    again = io.BytesIO()
    guard(parameter, unguard)
    torch.save(parameter, again)
    again.seek(0)
    assert type(torch.load(again)) is nn.Parameter


def test_an_error_leaves_the_guard() -> None:
    def fails(_: Tensor) -> None:
        raise TimeoutError

    parameter = nn.Parameter(torch.ones(2))
    guard(parameter, fails)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            parameter.sum()


def test_who_holds_the_memory() -> None:
    flat = torch.zeros(12)
    alone, first, second = nn.Parameter(torch.ones(3)), nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:])
    every = [alone, first, second]
    assert others_hold(every, every) == {first, second}  # `flat` holds it
    del flat
    assert others_hold(every, every) == set()
    view = alone.view(-1)
    assert others_hold(every, every) == {alone}
    del view
    array = alone.detach().numpy()
    assert others_hold(every, every) == {alone}
    del array
    assert others_hold([alone, first], [alone, first]) == {first}  # `second` is frozen
    turned = nn.Parameter(first.detach().t())
    assert others_hold([*every, turned], [*every, turned]) == {first, turned}
