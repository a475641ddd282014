"""`Codec`: how f32 values travel, as far as a plan must know: in which blocks, and how long these are.

The kernels are in native/kernels/codec.h, which has the formats and their errors.
"""

from __future__ import annotations

from typing import NamedTuple

VALUE_BYTES = 4
"""Codecs encode float32."""


class Codec(NamedTuple):
    """A shorter representation of float32 values, in blocks that stand alone."""

    name: str
    number: int
    """In the flags of a step: `enum cl_codec_kind` plus 1."""
    block_values: int
    block_bytes: int

    def encoded_bytes(self, length: int) -> int:
        """Encoded bytes of `length` bytes of float32; the last block is whole."""
        return -(-length // self.block_length) * self.block_bytes

    @property
    def block_length(self) -> int:
        """Bytes of a block before it is encoded."""
        return self.block_values * VALUE_BYTES


CODECS = {
    codec.name: codec
    for codec in (Codec("f16", 1, 1, 2), Codec("bf16", 2, 1, 2), Codec("int8", 3, 64, 66), Codec("int4", 4, 256, 130))
}
"""By name; numbers and blocks equal those of native/kernels/codec.h."""
