"""`is_zero`, `is_finite`: what holds for all values of a tensor.

Both ask for the least and the largest value. Of 2 Mi values of float32, that takes one core 0.2 ms; `any()` takes 2.0
ms, and `isfinite().all()` 4.5 (torch 2.13). Of fewer values it takes as long as `any()` or less (1 to 4,096: 2.2 to
2.7 µs, and 2.2 to 4.9).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def is_zero(values: Tensor) -> bool:
    """Whether all values are zero. NaN is not. No values are zero."""
    least, largest = _ends(values)
    return not (least or largest)


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite. No values are."""
    least, largest = _ends(values)
    return math.isfinite(least) and math.isfinite(largest)


def _ends(values: Tensor) -> tuple[Tensor, Tensor]:
    """The least value and the largest one; NaN, if one is NaN."""
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.aminmax() if values.numel() else (values.sum(), values.sum())
