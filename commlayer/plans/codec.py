"""`Codec`: the representation of float32 values in a message, as far as a plan must know it: the blocks.

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
    """The number in the flags of a step: `enum cl_codec_kind` plus 1."""
    block_values: int
    block_bytes: int

    def encoded_bytes(self, length: int) -> int:
        """Encoded bytes of `length` bytes of float32; the last block is whole."""
        return -(-length // self.block_length) * self.block_bytes

    @property
    def block_length(self) -> int:
        """Bytes of a block before it is encoded."""
        return self.block_values * VALUE_BYTES


class Encoding(NamedTuple):
    """How one range of values is encoded."""

    codec: Codec
    block: int
    """Number of its first block: codecs that rotate blocks draw a rotation for each number and encoding rank."""
    keeps: bool = False
    """INPUT keeps what does not arrive: rounding errors, and lost values."""

    @property
    def flags(self) -> int:
        """The flags of a step."""
        return self.codec.number << CODEC_SHIFT | self.keeps * KEEP


KEEP = 2
"""Flag of a step with a codec: INPUT keeps what does not arrive (CL_STEP_KEEP)."""

CODEC_SHIFT = 8
"""The flags' upper byte is the number of the codec of the message, or of the encoded memory; 0: none."""

CODECS = {
    codec.name: codec
    for codec in (
        Codec("f16", 1, 1, 2),
        Codec("bf16", 2, 1, 2),
        Codec("int8", 3, 64, 66),
        Codec("int4", 4, 256, 130),
        Codec("sign", 5, 128, 18),
    )
}
"""The codecs by name; numbers and blocks equal those of native/kernels/codec.h."""
