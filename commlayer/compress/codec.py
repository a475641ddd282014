"""`CodecPair`: the codecs that a policy's `codec` stands for."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from ..config import POWERSGD, TOPK, Policy


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
"""By `Policy.codec`, see `pair_of`; None: float32."""

FINE = "bf16"
"""The codec of parameters that are too sensitive for fewer bits: see fine.py."""


def codec_at(policy: Policy, step: int) -> str:
    """The policy's codec for a step of the training, the first of which is 0."""
    return FINE if starts_exact(policy.codec) and step < policy.exact_steps else policy.codec


def starts_exact(codec: str) -> bool:
    """Whether the first `Policy.exact_steps` of a training travel in 16 bits instead."""
    return codec == "sign" or has_own_messages(codec)


def pair_of(codec: str) -> CodecPair | None:
    """The codecs of all-reduces; beside messages of another form, fine values travel in them. None: float32."""
    return PAIRS[FINE if has_own_messages(codec) else codec]


def has_own_messages(codec: str) -> bool:
    """Whether gradients travel in another form than as encoded buckets. Such messages must not lose packets."""
    return is_low_rank(codec) or is_top_k(codec)


def is_low_rank(codec: str) -> bool:
    """Whether this is `powersgd:RANK`."""
    return codec.startswith(POWERSGD)


def low_rank_of(codec: str) -> int:
    """The RANK of `powersgd:RANK`."""
    return int(codec.removeprefix(POWERSGD))


def is_top_k(codec: str) -> bool:
    """Whether this is `topk:SHARE`."""
    return codec.startswith(TOPK)


def share_of(codec: str) -> Fraction:
    """The SHARE of `topk:SHARE`."""
    return Fraction(codec.removeprefix(TOPK))
