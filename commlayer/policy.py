"""`Policy`: how one group, or one communication hook, wants its operations done."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from .errors import ConfigError
from .kind import Kind, numbers, words
from .setting import check

Algorithm = Literal["auto", "direct", "ring"]
Treatment = Literal["feedback", "rescale", "zero"]

PRIORITIES = 8
"""Priority classes of the engine: 0 is the most urgent, PRIORITIES - 1 the least."""

YIELDS = PRIORITIES
"""The engine's class of operations that yield (CL_CLASS_YIELDS in native/congestion/class.h)."""

LOSS_BOUND_MAX = 0.5
"""The largest loss bound: the share of a message's packets that may be missing."""

LOSS_BOUND_LEAST = 1e-6
"""The smallest loss bound above 0."""

POWERSGD = "powersgd:"
"""Begins the codecs whose names end with a rank."""

POWERSGD_RANK_MAX = 1024

TOPK = "topk:"
"""Begins the codecs whose names end with a share."""

TOPK_SHARE_MAX = 0.5


def _codecs(known: Sequence[str]) -> Kind:
    """The words, `powersgd:RANK` and `topk:SHARE`."""
    kind = words((*known, f"{POWERSGD}RANK", f"{TOPK}SHARE"))
    rank, share = "[1-9][0-9]{0,3}", r"[0-9]*\.?[0-9]+(?:e-[0-9]{1,2})?"

    def plain(value: object) -> object:
        named = re.fullmatch(f"{POWERSGD}({rank})|{TOPK}({share})", value) if isinstance(value, str) else None
        if named and named[1]:
            return value if int(named[1]) <= POWERSGD_RANK_MAX else None
        return value if value in known or (named and 0 < float(named[2]) <= TOPK_SHARE_MAX) else None

    remedy = (
        f"{kind.remedy}, where RANK is a whole number from 1 to {POWERSGD_RANK_MAX}, and SHARE a number above 0 and up "
        f"to {TOPK_SHARE_MAX}"
    )
    return dataclasses.replace(kind, remedy=remedy, plain=plain)


CLASS = numbers("class", 0, PRIORITIES - 1, f"0 (most urgent) to {PRIORITIES - 1}", is_whole=True)
_STEPS = numbers("steps", 0, 10**9, "0 to 1000000000", is_whole=True)
_CODEC = _codecs(("none", "f16", "bf16", "int8", "int4-int8", "int4", "sign", "auto"))
_LOSS_SPAN = f"0 (no loss), or {LOSS_BOUND_LEAST:f} to {LOSS_BOUND_MAX}"
LOSS_BOUND = numbers("share of packets", LOSS_BOUND_LEAST, LOSS_BOUND_MAX, _LOSS_SPAN, also=(0,))


@dataclasses.dataclass(frozen=True)
class Policy:
    """How one group, or one communication hook, wants its operations done. The same on every rank."""

    priority: Annotated[
        int,
        CLASS,
        "operations of a lower class go first, in shared memory and as packets. A hook spreads its buckets over the "
        "classes `priority` - 2 to + 2, by their place in the model; `overlap` and pipelines over - 3 to + 3. While "
        "classes 0 and 1 are in use, the others keep their queues shorter, which costs them 1 to 2 % of the link",
    ] = 4
    deterministic: Annotated[
        bool,
        "reduce in a fixed order: the same inputs give the same bits in every run. Without it, too, all replicas have "
        "the same bits. Not with a `loss_bound`. Hooks, `overlap` and `pipeline.attach` without a policy take it from "
        "their group",
    ] = False
    algorithm: Annotated[
        Algorithm,
        "all-reduce between hosts: `direct` sends every shard to its owner (two network steps), `ring` passes shards "
        "around (least traffic per link), `auto` chooses by size and world. `ring` not with a `loss_bound`",
    ] = "auto"
    loss_bound: Annotated[
        float,
        LOSS_BOUND,
        "share of a message's packets that may be missing from sums and averages of floating-point numbers between "
        "hosts; all else is reliable",
    ] = 0.0
    treatment: Annotated[
        Treatment,
        "what happens to lost contributions. `feedback` adds them to the next step's gradient. Only the hook can do "
        "so; with `feedback`, other operations of the group lose nothing. `rescale` takes the mean of the others, "
        "`zero` counts them as 0",
    ] = "feedback"

    codec: Annotated[
        str,
        _CODEC,
        "representation of gradients between hosts, in the hook and in `compress_fsdp`. `f16` and `bf16` add up in "
        "float32. `int8` sends 1.03 bytes per value. `int4-int8` sends contributions in 4 bits and sums in 8; two "
        "hosts send no sums. `int4` sends both in 4 bits and keeps rounding errors for the next step. `sign` sends 1"
        " bit and keeps them, too; not for Adam. `powersgd:RANK` sends factors of matrices, `topk:SHARE` the largest"
        " values. `auto` measures and chooses, in the hook. See [compression.md](compression.md)",
    ] = "none"
    exact_steps: Annotated[
        int,
        _STEPS,
        "how many steps at the start of a training `sign`, `powersgd` and `topk` send in bf16: compression hurts most "
        "there",
    ] = 100
    allow_state: Annotated[
        bool,
        "whether `auto` may choose a codec that keeps rounding errors. It does so only where more than a quarter of "
        "the step is waiting",
    ] = False
    residual: Annotated[
        Literal["f32", "bf16"], "how a codec that keeps rounding errors stores them: in 4 or in 2 bytes per parameter"
    ] = "f32"

    yields: Annotated[
        bool,
        "between hosts, take only what other traffic leaves. Simulated, beside one TCP flow (cubic): at most 3 % of a "
        "port whose buffer holds half a bandwidth-delay product and 16 packets; up to 29 % where the buffer is shorter "
        "and shows no queue. `priority` then has no effect, and an operation within `commlayer.priority` does not "
        "yield. All ranks of a host need the same value. See "
        "[congestion.md](congestion.md#traffic-that-yields)",
    ] = False

    @property
    def service_class(self) -> int:
        """The class that the engine gets: `priority`, or YIELDS."""
        return YIELDS if self.yields else self.priority

    def __post_init__(self) -> None:
        check(self, Policy, lambda name, value: f"Policy({name}={value!r})")
        if self.loss_bound and self.deterministic:
            raise ConfigError("Policy(deterministic=True): losses are random; use loss_bound=0, or leave it out")
        if self.loss_bound and self.algorithm == "ring":
            raise ConfigError("Policy(algorithm='ring'): a ring adds up losses; use 'direct' with a loss_bound")
        if self.codec != "none" and self.algorithm == "ring":
            raise ConfigError(
                f"Policy(codec={self.codec!r}, algorithm='ring'): a ring would round at every hop; use 'auto' or "
                f"'direct' with a codec"
            )


def check_loss_bound(share: object, what: str) -> float:
    """A loss bound as a float. Raises ConfigError, which begins with `what`, for anything else."""
    return float(LOSS_BOUND.check(share, what))
