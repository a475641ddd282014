"""`Space`: the settings that a search may try."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass

from .arm import KEEPS_ERRORS, Arm

CODECS = ("none", "bf16", "int8", "int4-int8", "int4")
"""Codecs whose first steps are like all others, so that a short trial shows them. `sign`, `topk` and `powersgd` begin
with steps in bf16, and a training with them needs more steps: they stay with the user."""

LOSS_BOUNDS = (0.0, 0.01, 0.05)
PORTS = (1, 4)
BUCKETS = (4, 12)
"""Numbers of buckets to try, beside the job's own."""
LEAST_BUCKET_MB = 0.1

ALLOWABLE = ("lossy", "compressed", "stale")
"""Changes of the numerics."""


@dataclass(frozen=True)
class Space:
    """The values of each setting; their combinations are the arms."""

    codecs: tuple[str, ...] = ("none",)
    loss_bounds: tuple[float, ...] = (0.0,)
    overlaps: tuple[tuple[bool, int], ...] = ((False, 0), (True, 0))
    """Overlap and staleness."""
    buckets_mb: tuple[float, ...] = (0.0,)
    ports: tuple[int, ...] = (1,)
    replaces_gloo: bool = False
    """Whether the job's groups are gloo's: every arm but the default then has commlayer's in their place."""

    @classmethod
    def of(
        cls, allowed: Collection[str], nbytes: float, *, on_gloo: bool, has_network: bool, takes_hook: bool
    ) -> Space:
        """The space of a job: settings that act on it, and no others. `nbytes`: those of its gradients in a step.
        `has_network`: its data travels in packets, which alone are encoded and may be lost; within a host it is in
        shared memory. `takes_hook`: settings reach its DistributedDataParallel.

        Raises ValueError for a change that does not exist.
        """
        for name in allowed:
            if name not in ALLOWABLE:
                raise ValueError(f"--allow {name}: use some of {','.join(ALLOWABLE)}")
        overlaps: tuple[tuple[bool, int], ...] = ((False, 0), (True, 0))
        sizes = {size for count in BUCKETS if (size := bucket_mb(nbytes / count))}
        found = cls(
            codecs=CODECS if "compressed" in allowed and has_network else ("none",),
            loss_bounds=LOSS_BOUNDS if "lossy" in allowed and has_network else (0.0,),
            overlaps=(*overlaps, (True, 1)) if "stale" in allowed else overlaps,
            buckets_mb=(0.0, *sorted(sizes)),
            ports=PORTS if has_network else (1,),
            replaces_gloo=on_gloo,
        )
        return found if takes_hook else cls(overlaps=((False, 0),), ports=found.ports, replaces_gloo=on_gloo)

    def arms(self) -> list[Arm]:
        """All of them, the default first; those that the settings' checks refuse are left out."""
        product = itertools.product(self.codecs, self.loss_bounds, self.overlaps, self.buckets_mb, self.ports)
        made = [
            Arm(codec, loss_bound, overlap, staleness, size, ports, self.replaces_gloo)
            for codec, loss_bound, (overlap, staleness), size, ports in product
            if not (staleness and (loss_bound or codec in KEEPS_ERRORS))  # residuals come too late
        ]
        return [Arm(), *(arm for arm in made if not arm.is_default)]


def bucket_mb(nbytes: float) -> float:
    """A round size in MiB near this number of bytes; 0 for one that is too small."""
    size = nbytes / 2**20
    if size < LEAST_BUCKET_MB:
        return 0.0
    digits = 1 - math.floor(math.log10(size))
    return round(size, max(digits, 0))
