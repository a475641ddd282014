"""The map for `Qos.protect`: a bit per block of a gradient, set if packets with a part of the block are never lost."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def blocks_of(ranges: Iterable[tuple[int, int]], values: Tensor, block_bytes: int) -> Tensor:
    """Marks the blocks with an element of these ranges, (start, end) in elements; bool, one per block of `values`."""
    block = block_bytes // values.itemsize
    blocks = torch.zeros(-(-values.numel() // block), dtype=torch.bool, device="cpu")
    for start, end in ranges:
        if start < end:
            blocks[start // block : (end - 1) // block + 1] = True
    return blocks


def as_words(blocks: Tensor) -> Tensor:
    """The blocks as bits of int64 words, the first block as the lowest bit."""
    bits = torch.zeros(-(-len(blocks) // 64) * 64, dtype=torch.int64, device="cpu")
    bits[: len(blocks)] = blocks
    return (bits.view(-1, 64) << torch.arange(64, device="cpu")).sum(1)
