from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from commlayer.compress.values import is_finite, is_zero

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


SIZES = (24, 4097, 12289)


def with_one(value: complex, dtype: torch.dtype, size: int) -> Tensor:
    """Zeros, of which one has this value."""
    values = torch.zeros(size, dtype=dtype)
    values[23] = torch.tensor(value, dtype=dtype)
    return values


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
def test_one_value_decides(dtype: torch.dtype, size: int) -> None:
    for value in (0.0, -0.0):
        assert is_zero(with_one(value, dtype, size))
        assert is_finite(with_one(value, dtype, size))
    for value in (-1.0, 1.0, 6e-8):
        assert not is_zero(with_one(value, dtype, size))
        assert is_finite(with_one(value, dtype, size))
    for value in (math.nan, math.inf, -math.inf):
        assert not is_zero(with_one(value, dtype, size))
        assert not is_finite(with_one(value, dtype, size))


@pytest.mark.parametrize("size", SIZES)
def test_a_complex_value_has_two_parts(size: int) -> None:
    assert not is_zero(with_one(1j, torch.complex64, size))
    assert not is_finite(with_one(complex(0, math.inf), torch.complex64, size))


@pytest.mark.parametrize("size", SIZES)
def test_whole_numbers(size: int) -> None:
    assert is_zero(with_one(0, torch.int64, size))
    for value in (-3, 2):
        assert not is_zero(with_one(value, torch.int64, size))
        assert is_finite(with_one(value, torch.int64, size))


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_values(dtype: torch.dtype) -> None:
    assert is_zero(torch.empty(0, dtype=dtype))
    assert is_finite(torch.empty(0, dtype=dtype))


def test_values_apart_in_memory() -> None:
    whole = torch.zeros(4, 6)
    whole[1, 1] = 1.0
    assert is_zero(whole[:, ::2].t())
    assert not is_zero(whole[:, 1::2].t())
