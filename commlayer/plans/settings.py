"""What the choice and the shape of plans depend on, besides the collective itself."""

from __future__ import annotations

import dataclasses

from ..config import Algorithm
from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Settings:
    """How plans are made. All ranks of a group must have the same."""

    algorithm: Algorithm = "auto"
    """Between hosts of one rank each; "auto" decides by world size and length. Other groups have one algorithm each."""
    deterministic: bool = False
    """Reduce in a fixed order, so that the same inputs give the same bits in every run. (Replicas agree anyway.)"""
    segment_bytes: int = 256 << 10
    """Network: data of one segment over all ranks. Smaller pipelines more finely, larger costs fewer steps."""
    exchange_limit_bytes: int = 32 << 10
    """Network: an all-reduce for which a rank would send no more than this to all others together takes one step."""
    staging_bytes: int = 2 << 20
    """Shared memory per rank that one operation may use."""
    small_bytes: int = 64 << 10
    """Within a host, an all-reduce up to this size synchronises once, and every rank reduces all of it."""

    partial: bool = False
    """Contributions to a reduction may be lost between hosts, up to the operation's bound. With several ranks per host
    only to an all-reduce: their other plans lose nothing."""
    partial_results: bool = False
    """With `partial`: results may be lost on their way to the other ranks, too, where the former value stays."""
    partial_message_bytes: int = 0
    """With `partial`: length of a message that a tensor is not cut below: of a short one no packet may be lost."""

    def __post_init__(self) -> None:
        if self.segment_bytes < 1:
            raise ConfigError(f"segment_bytes must be at least 1, not {self.segment_bytes}")
        for name in ("exchange_limit_bytes", "staging_bytes", "small_bytes", "partial_message_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, but is {getattr(self, name)}")
