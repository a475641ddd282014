"""`RowCoder`: the parts of an all-to-all as bytes: encoded for other hosts, and as they are for ranks of this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...plans.codec import CODECS, Codec
from ...transport import kernels
from .tensors import writing

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The types of rows that can be encoded. The codecs take float32: others are converted before and after."""

_SAME = {"f16": torch.float16, "bf16": torch.bfloat16}
"""Codecs whose values are those of a type."""


class Part(NamedTuple):
    """The values that go to one rank, or come from it."""

    rank: int
    first: int
    """Number of the first value in the tensor."""
    values: int
    offset: int
    """Where its bytes begin in the message memory."""
    length: int


class RowCoder:
    """Encodes what this rank sends in one all-to-all, and decodes what it receives.

    `codec` is a name of `plans.codec.CODECS`. `key` is equal on all ranks and chooses the rotations. `rank` is this
    rank, `local` has the ranks of its host.
    """

    def __init__(self, codec: str, key: int, dtype: torch.dtype, rank: int, local: Sequence[int]) -> None:
        self.codec: Codec = CODECS[codec]
        self._key = key
        self._dtype = dtype
        self._rank = rank
        self._local = frozenset(local)

    @property
    def is_exact(self) -> bool:
        """Whether encoded values would be the values themselves: these can travel as they are."""
        return _SAME.get(self.codec.name) == self._dtype

    def lengths(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Bytes of `counts[r]` values for or from rank r."""
        return tuple(self._length(rank, count) for rank, count in enumerate(counts))

    def encoded(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """The bytes to send: those of the first `counts[0]` values for rank 0, and so on. `values` is contiguous."""
        target = torch.empty(sum(self.lengths(counts)), dtype=torch.uint8, device="cpu")
        flat = values.detach().reshape(-1)
        for part in self._parts(counts):
            ours = flat[part.first : part.first + part.values]
            if part.rank in self._local:
                target[part.offset : part.offset + part.length] = ours.view(torch.uint8)
                continue
            wide = ours.to(torch.float32)
            key = kernels.codec_key(self._key, self._rank)
            kernels.encode(
                self.codec.number, target.data_ptr() + part.offset, wide.data_ptr(), part.values, key=key, block=0
            )
        return target

    def decode(self, source: Tensor, output: Tensor, counts: Sequence[int]) -> None:
        """Writes the values of the received bytes to `output`."""
        with writing([output]):
            flat = output.view(-1) if output.is_contiguous() else output.new_empty(output.numel())
            for part in self._parts(counts):
                theirs = flat[part.first : part.first + part.values]
                if part.rank in self._local:
                    theirs.view(torch.uint8).copy_(source[part.offset : part.offset + part.length])
                    continue
                wide = (
                    theirs
                    if self._dtype == torch.float32
                    else torch.empty(part.values, dtype=torch.float32, device="cpu")
                )
                key = kernels.codec_key(self._key, part.rank)
                kernels.decode(
                    self.codec.number, wide.data_ptr(), source.data_ptr() + part.offset, part.values, key=key, block=0
                )
                if wide is not theirs:
                    theirs.copy_(wide)
            if not output.is_contiguous():
                output.copy_(flat.view(output.shape))

    def _length(self, rank: int, count: int) -> int:
        return count * self._dtype.itemsize if rank in self._local else self.codec.encoded_bytes(4 * count)

    def _parts(self, counts: Sequence[int]) -> Iterator[Part]:
        lengths = self.lengths(counts)
        places = zip(accumulate(counts, initial=0), counts, accumulate(lengths, initial=0), lengths, strict=False)
        return (Part(rank, *place) for rank, place in enumerate(places) if place[1])
