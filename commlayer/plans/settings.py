"""`Settings`: how plans are chosen and cut, beside the collective itself."""

from __future__ import annotations

import dataclasses

from ..config import Algorithm
from ..errors import ConfigError

PAIR_FACTOR = 8
"""Between two hosts, all-reduces of up to so many times `exchange_limit_bytes` (256 KiB) take one network step. Above,
two steps are faster over fast links: one step copies and adds twice as many bytes."""

SEGMENT_MEMBERS = 16
"""Members for which a segment has its usual length: with more of them, its messages keep their length."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of plans. All ranks of a group must have the same. Raises ConfigError for values out of range."""

    algorithm: Algorithm = "auto"
    """The plan: "auto" decides by world size and length between hosts of one rank each. Others have one algorithm."""
    deterministic: bool = False
    """Reduce in a fixed order, so that the same inputs give the same bits in every run. (Replicas agree anyway.)"""
    segment_bytes: int = 256 << 10
    """Network: bytes of one segment over up to SEGMENT_MEMBERS ranks, see `segment_for`. Smaller ones pipeline more
    finely, larger ones take fewer steps."""
    exchange_limit_bytes: int = 32 << 10
    """Network: an all-reduce takes one step if a host then sends no more than this to all others together. Between two
    hosts the limit is PAIR_FACTOR times this, without codec and loss bound: they send no more in one step than in
    two."""
    packet_bytes: int = 0
    """Payload of a full packet between hosts; 0: not known. Messages of whole packets leave faster: a short packet ends
    the run of equal ones that the kernel takes as one. See docs/congestion.md, "Batches"."""
    staging_bytes: int = 2 << 20
    """Shared memory per rank that one operation may use."""
    small_bytes: int = 64 << 10
    """Within a host, an all-reduce up to this size synchronises once, and every rank reduces all of it."""

    partial: bool = False
    """Contributions to a reduction may be lost between hosts, up to the operation's loss bound. With several ranks per
    host this holds for all-reduce only."""
    partial_results: bool = False
    """Results may be lost, too, with `partial`; a rank then keeps its former value."""
    partial_message_bytes: int = 0
    """The shortest message to cut a tensor into with `partial`. No packet of a short message may be lost."""

    codecs: tuple[str, str] | None = None
    """Codecs of float32 between hosts, by name: of the contributions to a reduction, and of the values that an
    all-reduce or an all-gather spreads."""
    keep_errors: bool = False
    """INPUT keeps rounding errors and lost values of `codecs`: see `Plan.kept`."""
    keep_sums: bool = True
    """With `keep_errors`, the owner of a shard, if it encodes sums, keeps the error of its sum, too."""

    weights: tuple[int, ...] = ()
    """Weights of the hosts, in their order: the shards of an all-reduce between hosts are in their proportion. A host
    of weight 0 owns nothing. (): equal shards. See `weights.weights_for`."""

    def segment_for(self, members: int) -> int:
        """Bytes of a segment that is cut into messages for so many members: more members get longer segments, so that
        no message becomes shorter than a packet, and the steps do not grow with the square of the ranks."""
        return self.segment_bytes * max(members, SEGMENT_MEMBERS) // SEGMENT_MEMBERS

    def is_short(self, hosts: int, length: int) -> bool:
        """Whether an all-reduce of `length` bytes takes one network step: each host sends all it has to all others."""
        is_plain = self.codecs is None and not self.partial
        factor = PAIR_FACTOR if hosts == 2 and is_plain else 1
        return (hosts - 1) * length <= factor * self.exchange_limit_bytes

    def __post_init__(self) -> None:
        if self.segment_bytes < 1:
            raise ConfigError(f"Settings(segment_bytes={self.segment_bytes}): use at least 1")
        for name in ("exchange_limit_bytes", "staging_bytes", "packet_bytes", "small_bytes", "partial_message_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"Settings({name}={getattr(self, name)}): use 0 or more")
        if self.weights and (min(self.weights) < 0 or max(self.weights) == 0):
            raise ConfigError(
                f"Settings(weights={self.weights}): use 0 or more for each host, and more for one of them"
            )
