"""The residual that a `Feedback` keeps, as tests look at it."""

from __future__ import annotations

import torch
from torch import Tensor

from commlayer.compress.feedback import Feedback


def total(feedback: Feedback, parameter: Tensor) -> Tensor:
    """The residual of one parameter, as a tensor of its shape and dtype."""
    flat = torch.zeros(parameter.numel(), dtype=parameter.dtype)
    for offset, values, _ in feedback._kept.get(parameter, ()):
        flat[offset : offset + len(values)] += values.to(flat.dtype)
    return flat.view(parameter.shape)
