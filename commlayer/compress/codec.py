"""`CodecPair`: the codecs that a policy's `codec` stands for."""

from __future__ import annotations

from typing import NamedTuple

from ..config import Policy


class CodecPair(NamedTuple):
    """The representations of an all-reduce; names are those of plans/codec.py."""

    up: str
    """Of contributions, on their way to the owner of a shard."""
    down: str
    """Of sums, on their way back."""
    keeps_errors: bool = False
    """Whether rounding errors are added to the next step's gradient."""


class Coding(NamedTuple):
    """The codecs of one operation."""

    pair: CodecPair
    key: int
    """Chooses the rotations of blocks: the same on all ranks, another one for each operation."""


PAIRS: dict[str, CodecPair | None] = {
    "none": None,
    "auto": None,  # until a Choice has named one
    "f16": CodecPair("f16", "f16"),
    "bf16": CodecPair("bf16", "bf16"),
    "int8": CodecPair("int8", "int8"),
    "int4-int8": CodecPair("int4", "int8"),
    "int4": CodecPair("int4", "int4", keeps_errors=True),
    "sign": CodecPair("sign", "sign", keeps_errors=True),
}
"""By `Policy.codec`; None: float32."""

FINE = "bf16"
"""The codec of parameters that are too sensitive for fewer bits: see fine.py."""


def codec_at(policy: Policy, step: int) -> str:
    """The policy's codec for a step of the training, the first of which is 0."""
    return FINE if starts_exact(policy.codec) and step < policy.exact_steps else policy.codec


def starts_exact(codec: str) -> bool:
    """Whether the first steps of a training are sent in 16 bits."""
    return codec == "sign"
