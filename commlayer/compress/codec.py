"""`Codec`: the meaning of a policy's `codec`. Nothing else reads its text."""

from __future__ import annotations

import dataclasses
import enum
import functools
from fractions import Fraction
from typing import NamedTuple

from ..config import POWERSGD, TOPK, Policy


class CodecPair(NamedTuple):
    """The representations of an all-reduce; names are those of plans/codec.py."""

    up: str
    """The codec of contributions, on their way to the owner of a shard."""
    down: str
    """The codec of sums, on their way back."""
    keeps_errors: bool = False
    """Whether rounding errors are added to the next step's gradient."""
    keeps_sums: bool = True
    """Whether, with `keeps_errors`, the owner of a shard keeps the error of its sum, too."""

    def with_errors(self) -> CodecPair:
        """The same codecs, whose every error is kept by the rank that encoded a contribution. Errors of sums are not
        kept: they are those of all ranks."""
        return self._replace(keeps_errors=True, keeps_sums=False)


class Coding(NamedTuple):
    """The codecs of one operation."""

    pair: CodecPair
    key: int
    """Chooses the rotations of blocks: the same on all ranks, another one for each operation."""


class Form(enum.Enum):
    """The form in which the gradients of a bucket travel."""

    EXACT = "as they are"
    ENCODED = "encoded, packet by packet"
    LOW_RANK = "as low-rank factors of matrices"
    SELECTED = "as the largest values, with their places"


@dataclasses.dataclass(frozen=True)
class Codec:
    """A value of `Policy.codec`."""

    name: str
    form: Form
    pair: CodecPair | None
    """The codecs of all-reduces; None: float32. Beside messages of another form, fine values travel in them."""
    keeps_errors: bool = False
    """Whether the next step's gradient gets what this one's representation has lost."""
    starts_exact: bool = False
    """Whether the first `Policy.exact_steps` of a training travel in 16 bits instead."""
    bursts: bool = False
    """Whether residuals of many steps arrive at once, which inflates an average of squared gradients."""
    rank: int = 0
    """The rank of low-rank factors."""
    share: Fraction = Fraction(0)
    """Share of the values that are selected."""

    @property
    def may_lose(self) -> bool:
        """Whether its messages may lose packets."""
        return self.form in (Form.EXACT, Form.ENCODED)


_PAIRS: dict[str, CodecPair | None] = {
    "none": None,
    "auto": None,  # none until a Choice has named one
    "f16": CodecPair("f16", "f16"),
    "bf16": CodecPair("bf16", "bf16"),
    "int8": CodecPair("int8", "int8"),
    "int4-int8": CodecPair("int4", "int8"),
    "int4": CodecPair("int4", "int4", keeps_errors=True),
    "sign": CodecPair("sign", "sign", keeps_errors=True),
}

FINE = "bf16"
"""The codec of parameters that are too sensitive for fewer bits: see fine.py."""

ENCODED = {name: pair for name, pair in _PAIRS.items() if pair is not None}
"""The codecs of `Form.ENCODED`."""

STATELESS = tuple(name for name, pair in _PAIRS.items() if name != "auto" and not (pair and pair.keeps_errors))
"""The codecs that keep nothing from step to step."""


@functools.cache
def codec_of(name: str) -> Codec:
    """The codec that a valid `Policy.codec` names."""
    if name.startswith(POWERSGD):
        rank = int(name.removeprefix(POWERSGD))
        return Codec(name, Form.LOW_RANK, _PAIRS[FINE], keeps_errors=True, starts_exact=True, rank=rank)
    if name.startswith(TOPK):
        share = Fraction(name.removeprefix(TOPK))
        fine = _PAIRS[FINE]
        return Codec(name, Form.SELECTED, fine, keeps_errors=True, starts_exact=True, bursts=True, share=share)
    pair = _PAIRS[name]
    if pair is None:
        return Codec(name, Form.EXACT, None)
    is_sign = name == "sign"
    return Codec(name, Form.ENCODED, pair, pair.keeps_errors, starts_exact=is_sign, bursts=is_sign)


def codec_at(policy: Policy, step: int) -> str:
    """The policy's codec for a step of the training, the first of which is 0."""
    return FINE if codec_of(policy.codec).starts_exact and step < policy.exact_steps else policy.codec
