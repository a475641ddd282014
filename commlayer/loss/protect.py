"""Which packets of a gradient are never lost: the map that `Qos.protect` wants, one bit per block, in words of 64."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def largest_blocks(values: Tensor, share: float, block_bytes: int) -> Tensor:
    """Marks the `share` of the blocks of `block_bytes` that have the largest elements; bool, one per block.

    `values` is flat; the last block may be shorter.
    """
    each = block_bytes // values.itemsize
    whole = values.numel() // each
    magnitude = torch.linalg.vector_norm(values[: whole * each].view(whole, each).float(), torch.inf, dim=1)
    if whole * each < values.numel():
        rest = values[whole * each :].float().abs().amax()
        magnitude = torch.cat([magnitude, rest.view(1)])
    marks = torch.zeros(len(magnitude), dtype=torch.bool)
    marks[magnitude.topk(round(share * len(magnitude))).indices] = True
    return marks


def blocks_of(ranges: Iterable[tuple[int, int]], values: Tensor, block_bytes: int) -> Tensor:
    """Marks the blocks with any of these elements of `values`, (start, end); bool, one per block."""
    each = block_bytes // values.itemsize
    marks = torch.zeros(-(-values.numel() // each), dtype=torch.bool)
    for start, end in ranges:
        if start < end:
            marks[start // each : (end - 1) // each + 1] = True
    return marks


def as_words(marks: Tensor) -> Tensor:
    """The marks as bits, int64."""
    bits = torch.zeros(-(-len(marks) // 64) * 64, dtype=torch.int64)
    bits[: len(marks)] = marks
    return (bits.view(-1, 64) << torch.arange(64)).sum(1)
