"""Reproducible data with exact reductions: a wrong element is a bug and never rounding.

Each rank can compute the values of all ranks, as in nccl-tests, so a check needs no reference run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_BLOCK = 1 << 20  # elements generated at a time: the int64 scratch stays at 8 MB whatever the size

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}

EXACT_INTEGER_LIMIT = {torch.float64: 1 << 53, torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}
"""The type has a value for every integer up to this one."""


def _hash(start: int, stop: int, rank: int) -> torch.Tensor:
    """Well-mixed 16-bit integers, so that a shifted, swapped or repeated range is wrong in most elements."""
    mixed = torch.arange(start, stop, dtype=torch.int64).add_(rank * 0x9E3779B1 + 1)
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D)):
        mixed.bitwise_xor_(mixed >> shift).mul_(factor).bitwise_and_(0xFFFFFFFF)
    return mixed.bitwise_xor_(mixed >> 16).bitwise_and_(0xFFFF)


def _values(start: int, stop: int, rank: int, world: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    mixed = _hash(start, stop, rank)
    if op == "product":
        # +-1 keeps a float exact; integers wrap, so every odd factor is exact
        return (mixed & 1) * 2 - 1 if dtype.is_floating_point else (mixed & 1) * 2 + 1
    limit = EXACT_INTEGER_LIMIT.get(dtype, 127)
    largest = max(1, min(63, limit // world)) if op == "sum" else min(127, limit)
    return mixed % (largest + 1)


def fill(out: torch.Tensor, rank: int, world: int, op: str) -> None:
    """Writes rank `rank`'s input of a `world`-rank collective with reduction `op` (sum, product, min, max)."""
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        out[start:stop] = _values(start, stop, rank, world, out.dtype, op).to(out.dtype)


def fill_reduced(out: torch.Tensor, world: int, op: str, *, first: int = 0) -> None:
    """Writes the exact reduction of all ranks' inputs, elements `first` to `first + out.numel()`."""
    combine = _COMBINE[op]
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        total = _values(first + start, first + stop, 0, world, out.dtype, op)
        for rank in range(1, world):
            total = combine(total, _values(first + start, first + stop, rank, world, out.dtype, op))
        out[start:stop] = total.to(out.dtype)


def fill_digits(out: torch.Tensor, total: torch.Tensor, rank: int, world: int, bits: int, largest: int) -> None:
    """Writes rank `rank`'s input, 1 to `largest` times 2^(bits x rank), and the sum of all ranks' inputs.

    A sum shows which ranks contributed to it.
    """
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        digits = [_hash(start, stop, place) % largest + 1 << bits * place for place in range(world)]
        out[start:stop] = digits[rank].to(out.dtype)
        total[start:stop] = torch.stack(digits).sum(0).to(out.dtype)


def exact_chain(world: int, dtype: torch.dtype, op: str) -> int:
    """Number of consecutive in-place all-reduces with exact results, each of which starts from the last result.

    A sum grows by the factor `world` each time. A power of two only changes a float's exponent; other factors use up
    its significand. Integers wrap, which is exact. The other reductions do not grow.
    """
    if op != "sum" or world == 1 or not dtype.is_floating_point:
        return 1 << 30
    largest = max(1, min(63, EXACT_INTEGER_LIMIT[dtype] // world))
    limit = torch.finfo(dtype).max if world & (world - 1) == 0 else EXACT_INTEGER_LIMIT[dtype]
    length = 0
    while largest * world ** (length + 1) <= limit:
        length += 1
    return max(1, length)
