"""The residuals that a `Feedback` or a `HookState` keeps, as tests look at them."""

from typing import Any

import torch
from torch import Tensor

import commlayer
from commlayer.compress.feedback import Feedback


def total(feedback: Feedback, parameter: Tensor) -> Tensor:
    """The residual of one parameter, as a tensor of its shape and dtype."""
    flat = torch.zeros(parameter.numel(), dtype=parameter.dtype)
    for offset, values, _ in feedback._kept.get(parameter, ()):
        flat[offset : offset + len(values)] += values.to(flat.dtype)
    return flat.view(parameter.shape)


def saved(state: commlayer.HookState) -> list[Tensor]:
    """Copies of all residuals and factors that a checkpoint holds, in a fixed order."""
    found = state.state_dict()
    return _tensors_of([found["feedback"]["kept"], found["low_rank"]])


def _tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state.clone()]
    nested = [state[key] for key in sorted(state)] if isinstance(state, dict) else state
    return [tensor for item in nested for tensor in _tensors_of(item)] if isinstance(nested, (list, tuple)) else []


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether these are the same tensors."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
