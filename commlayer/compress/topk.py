"""Top-k: the values of largest magnitude travel, with their places; the others wait as residual.

Aji and Heafield ("Sparse Communication for Distributed Gradient Descent", EMNLP 2017). Error feedback makes it converge
(Stich, Cordonnier, Jaggi: "Sparsified SGD with Memory", NeurIPS 2018). A payload has these parts, little-endian:

    uint32 per block of 65536 values    how many of the block's values follow
    uint16 per value sent               its place in its block, ascending
    bf16 per value sent                 the value

So a value takes 4 bytes, and a block 4. Payloads of equal share and size are equally long: if there are fewer values
other than 0, zeros are sent, too.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

_BLOCK_BITS = 16
BLOCK = 1 << _BLOCK_BITS
"""Values of a buffer that share a count."""

_LARGEST = torch.finfo(torch.bfloat16).max

COUNT_BYTES = 4
VALUE_BYTES = 4


def selected(share: Fraction, values: int) -> int:
    """How many of so many values are sent: the share, rounded up."""
    return math.ceil(share * values)


def take_out(values: Tensor, indices: Tensor, chosen: Tensor) -> Tensor:
    """The payload of the values `chosen`, which are at the ascending `indices` of `values`, a flat float32 buffer.

    Leaves their rounding errors in `values`: payload + `values` is exactly what `values` was, if that is finite.
    """
    bounded = torch.where(chosen.isfinite(), chosen.clamp(-_LARGEST, _LARGEST), chosen)  # none rounds to infinity
    places, sent = indices.long(), bounded.bfloat16()
    values[places] = chosen - sent.float()
    counts = torch.bincount(places >> _BLOCK_BITS, minlength=_blocks(values))
    parts = counts.to(torch.int32), (places & (BLOCK - 1)).to(torch.uint16), sent
    return torch.cat([part.view(torch.uint8) for part in parts])


def add_to(target: Tensor, payload: Tensor) -> None:
    """Adds the values of a payload to `target`, a flat float32 buffer."""
    begin = _blocks(target) * COUNT_BYTES
    middle = (begin + len(payload)) // 2
    counts = payload[:begin].view(torch.int32)
    firsts = torch.arange(0, target.numel(), BLOCK, device="cpu").repeat_interleave(counts)
    places = firsts + payload[begin:middle].view(torch.uint16).long()
    target.index_add_(0, places, payload[middle:].view(torch.bfloat16).float())


def largest_of(payload: Tensor, target: Tensor) -> float:
    """The largest magnitude of the values of a payload for `target`; NaN if one of them is."""
    begin = _blocks(target) * COUNT_BYTES
    return float(payload[(begin + len(payload)) // 2 :].view(torch.bfloat16).abs().max())


def _blocks(values: Tensor) -> int:
    return -(-values.numel() // BLOCK)
