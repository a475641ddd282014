"""`Heads`: what the ranks tell each other at the start of an average of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...errors import CommError, ConfigError
from ..group.backend import CommProcessGroup
from ..work.context import AHEAD, labelled, priority
from ..work.odd import odd_ones, usual
from .meeting import on_all
from .sync import no_count

SCALED = "gradients are averaged as they are scaled: give the GradScalers of all ranks the same init_scale"
SKIPPED = (
    "one of the ranks averages in optimizer.step(), since it has made fewer backward passes than in the step before, "
    "and the GradScaler of another one has skipped that step before the average, for an overflow of its own "
    "gradients: with a GradScaler, make equally many backward passes in each step"
)
"""Why loss scales differ, and what to do: from the start, and after a step of a GradScaler."""


class Head(NamedTuple):
    """What a rank tells the others."""

    step: int
    """The number of the step. 0 where a GradScaler may skip steps of one rank."""
    passes: int = 0
    """Backward passes of the step so far."""
    is_leaving: bool = False
    """Whether it makes no more steps."""
    samples: float = 0.0
    """This site's, in the step; NaN: `samples` gave no count."""
    scale: float = 1.0
    """The factor of the gradients, by the job's GradScaler."""
    is_in_step: bool = False
    """Whether the average begins in `optimizer.step()`, after the GradScaler has looked at this rank's gradients."""
    fixed: int = 0
    """See `Told`."""
    changed: int = 0
    spoiled: int = 0


class Heads:
    """The heads of all ranks of the group, of one average after the other. `is_weighted`: sites count by samples."""

    def __init__(self, group: CommProcessGroup, *, is_weighted: bool) -> None:
        self._group, self._is_weighted = group, is_weighted
        self._met: list[Head] | None = None

    def tell(self, own: Head) -> None:
        """Tells the others this rank's head. An average begins."""
        self._all = torch.empty(self._group.size(), len(own), dtype=torch.float64, device="cpu")
        self._met = None
        with priority(AHEAD), labelled(f"exact step {own.step}"):
            self._work = self._group.all_gather_single(
                self._all.view(-1), torch.tensor(own, dtype=torch.float64, device="cpu")
            )

    def meet(self) -> list[Head]:
        """The heads of all ranks; waits for them. Raises the same error on all ranks: CommError if some leave and
        others do not, for steps that differ, and where a GradScaler has skipped a step of some ranks; ConfigError for
        wrong counts of samples, and scales that differ."""
        if self._met is None:
            self._work.wait()
            rows = self._all.tolist()
            heads = [
                Head(int(step), int(passes), bool(leaves), samples, scale, bool(is_in_step), *map(int, told))
                for step, passes, leaves, samples, scale, is_in_step, *told in rows
            ]
            self._check(heads)
            self._met = heads
        return self._met

    def weight(self) -> float:
        """That of this rank's gradients: n_r S / sum(n) of the samples n of S sites, as in `gradients/samples.py`; 0
        where no site has samples."""
        if not self._is_weighted:
            return 1.0
        counts = [head.samples for head in self.meet()]
        return counts[self._group.rank()] * len(counts) / (math.fsum(counts) or 1.0)

    def _check(self, heads: Sequence[Head]) -> None:
        who, ranks = self._group.who, dist.get_process_group_ranks(self._group)
        may_skip = any(head.is_in_step for head in heads) and any(head.scale != 1.0 for head in heads)
        leaving = [rank for rank, head in zip(ranks, heads, strict=True) if head.is_leaving]
        if leaving and len(leaving) < len(ranks):
            text = (
                f"{who}: rank {leaving[0]} has ended `with LocalSteps(...)`, and others make another exact step: make "
                f"equally many on all ranks, or end the exact steps before (exact_steps=, every=)"
                f"{f'. Or {SKIPPED}' if may_skip else ''}"
            )
            raise on_all(CommError(text), leaving[0])
        for rank, head in zip(ranks, heads, strict=True):
            if math.isnan(head.samples):
                raise on_all(ConfigError(no_count(who, rank)), rank)
        for kind, what, values, remedy in (
            (
                CommError,
                "the number of the step",
                [head.step for head in heads],
                "make equally many backward passes and steps on all ranks",
            ),
            (
                CommError if may_skip else ConfigError,
                "the loss scale",
                [head.scale for head in heads],
                SKIPPED if may_skip else SCALED,
            ),
        ):
            if odd := odd_ones(values):
                found = ", ".join(f"{values[at]:g} on rank {ranks[at]}" for at in sorted({usual(values), odd[0]}))
                raise on_all(kind(f"{who}: exact step: {what} differs: {found}; {remedy}"), ranks[odd[0]])
