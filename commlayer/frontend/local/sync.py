"""`Sync`: one fragment on its way to all sites: what this site has sent of it, and what the owners counted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, Work

from ...compress.codec import CodecPair
from ...compress.values import is_finite
from ...config import Config, Policy, policy_of_groups
from ...errors import CommError, ConfigError
from ..group.backend import CommProcessGroup
from ..group.transfer import LEAST_CLASS
from ..work.context import labelled
from ..work.odd import odd_ones
from .fragment import Part
from .meeting import on_all

CLASS = LEAST_CLASS - 1
"""The class of syncs: all else goes first, but the state for a site that joins. Its packets get no copies on lossy
paths (CL_CLASSES_PROMPT in native/congestion/class.h): training hides the time of a sync."""


def policy_of_syncs() -> Policy:
    """That of the group in which sites exchange fragments."""
    return dataclasses.replace(policy_of_groups(Config.from_environment()), priority=CLASS)


class Head(NamedTuple):
    """What a rank tells the others beside its values."""

    turn: int
    digest: int
    """The digest of the fragment's shared weights, before this sync; 0: the rank lacks them."""
    is_finite: bool
    """Whether all values that it sends are finite."""
    is_leaving: bool
    """Whether it makes no more local steps."""
    steps: int
    """Local steps since the fragment's last sync."""
    samples: float
    """Samples of these steps; NaN: `samples` gave no count."""
    is_listening: bool = False
    """Whether it has joined, and has made no step yet: it counts nothing."""
    invites: bool = False
    """Whether sites wait that join after this sync."""
    is_late: bool = False
    """Whether its loop has not come, so that it counts nothing."""
    waited: float = 0.0
    """The share of its time that its site has waited for syncs, see `following_every`."""
    used: float = 1.0
    """The share of a turn in which syncs ended, see `following_every`."""
    every: int = 0
    """Those of the turns of which it is a sync; 0: the state that it came from does not tell."""
    since_turn: int = -1
    since_step: int = 0
    fixed: int = 0
    """See `Told`."""
    changed: int = 0
    spoiled: int = 0


class Outcome(NamedTuple):
    """The end of a sync, the same on all ranks."""

    heads: list[Head]
    average: Tensor
    """The average change D of the sites, weighted by samples."""
    is_rest: bool
    """Whether no site has samples of new steps: the changes are then what an earlier sync has left, or none."""
    buffers: Tensor
    """The average of the sites' buffers."""


@dataclasses.dataclass
class Sync:
    """A sync in flight. `difference` is d = x - G of this rank's shard, when the sync began."""

    group: CommProcessGroup
    head: Head
    difference: Tensor
    parts: Sequence[Part]
    pair: CodecPair | None
    """The codecs of parts that are not fine; None: all parts are exact."""
    fine: CodecPair | None
    buffers: Tensor
    """Flat, averaged exactly; empty: none."""
    is_weighted: bool
    """Whether samples give the weights; else all sites have the same."""
    ranks: Sequence[int]
    """Those of the group in the job."""
    age: int = 0
    """Local steps since it began."""
    has_listeners: bool = False
    """Whether a rank of the group counts nothing, as all know from what they have told before."""
    every: CommProcessGroup | None = None
    """All ranks of all sites: an operation of theirs fails on all after a death. None: the group has all."""

    def __post_init__(self) -> None:
        self.has_begun = False
        self.invites = False
        """Once it has ended: whether sites wait that join after this sync."""

    def start(self) -> None:
        """Submits the operations. All ranks start the same syncs in the same order."""
        self.has_begun = True
        own = torch.tensor([self.head], dtype=torch.float64, device="cpu")
        self._heads = torch.empty(self.group.size(), len(self.head), dtype=torch.float64, device="cpu")
        options = AllreduceOptions()
        self._is_sum = self.is_weighted or self.has_listeners
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM if self._is_sum else dist.ReduceOp.AVG)
        weight = self.head.samples if self.is_weighted else 1.0
        self._weight = weight if math.isfinite(weight) else 0.0
        self._source, self._averages = self._weighed(self.difference), self._weighed(self.buffers)
        self._target = torch.empty_like(self._source)
        turn = self.head.turn
        with labelled(f"sync {turn}"):
            self._works: list[tuple[Part, Work]] = []
            self._head_work = self.group.all_gather_single(self._heads.view(-1), own.view(-1))
            for number, part in enumerate(self.parts):
                source, target = self._source[part.start : part.end], self._target[part.start : part.end]
                pair = self.fine if part.is_fine else self.pair
                key = turn << 16 | number
                work = self.group.allreduce_from(source, target, options, key=key, pair=pair and pair.with_errors())
                self._works.append((part, work))
            self._buffer_work = self.group.allreduce([self._averages], options) if len(self.buffers) else None
            self._invited = torch.tensor([float(self.head.invites)], dtype=torch.float32, device="cpu")
            largest = AllreduceOptions()
            largest.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
            self._every_work = None if self.every is None else self.every.allreduce([self._invited], largest)

    def _weighed(self, values: Tensor) -> Tensor:
        """A copy with the weight of this site. A site without samples sends zeros."""
        return values * self._weight if self._weight else torch.zeros_like(values)

    @property
    def is_done(self) -> bool:
        """Whether `finish` returns or raises at once."""
        return all(each.is_completed() for each in self._all_works)

    @property
    def _all_works(self) -> list[Work]:
        works = [self._head_work, *(work for _, work in self._works), self._buffer_work, self._every_work]
        return [work for work in works if work is not None]

    def finish(self) -> Outcome:
        """Waits for the operations. Raises their error, as PeerLostError, and the same error on all ranks for values
        that are not finite, for shared weights that differ, and for wrong counts of samples."""
        for work in self._all_works:
            work.wait()
        heads = [_head(values) for values in self._heads.tolist()]
        self._check(heads)
        self.invites = bool(self._invited[0]) or any(head.invites for head in heads)
        counting = [head for head in heads if not (head.is_listening or head.is_late)]
        total = sum(head.samples if self.is_weighted else 1.0 for head in counting)
        if not self._is_sum:
            total /= len(heads)  # 1, unless some are late
        total = total or 1.0  # nobody counts, or has samples: all values are 0
        is_rest = not any(head.samples for head in heads)
        return Outcome(heads, self._target / total, is_rest, self._averages / total)

    def counted(self) -> Tensor:
        """q: the change of this site as the owners have counted it. Holds once a site has the sync's outcome."""
        if not self._weight:
            return torch.zeros_like(self.difference)
        lost = torch.zeros_like(self._source)
        for part, work in self._works:
            for offset, length in work.kept:  # type: ignore[attr-defined]  # a CommWork
                first = part.start + offset // lost.itemsize
                last = first + length // lost.itemsize
                lost[first:last] = self._source[first:last]
        return self.difference - lost / self._weight

    def _check(self, heads: Sequence[Head]) -> None:
        who = self.group.who
        for at, head in enumerate(heads):
            if not head.is_finite:
                rank = self.ranks[at]
                text = (
                    f"{who}: sync {self.head.turn}: the weights of rank {rank} are not finite; the sites must not "
                    f"share them: restore a checkpoint on all ranks, with a lower learning rate or a GradScaler"
                )
                raise on_all(CommError(text), rank)
            if math.isnan(head.samples):
                rank = self.ranks[at]
                raise on_all(ConfigError(no_count(who, rank)), rank)
        for what, told in (
            ("turns", {rank: head.turn for rank, head in zip(self.ranks, heads, strict=True)}),
            ("digests", {rank: head.digest for rank, head in zip(self.ranks, heads, strict=True) if head.digest}),
        ):
            ranks, values = list(told), list(told.values())
            if odd := odd_ones(values):
                found = ", ".join(f"{value:#x} on rank {rank}" for rank, value in zip(ranks, values, strict=True))
                text = (
                    f"{who}: sync {self.head.turn}: the shared weights of rank {ranks[odd[0]]} are not those of the "
                    f"others ({what}: {found}); restore the same checkpoint on all ranks"
                )
                raise on_all(CommError(text), ranks[odd[0]])


def no_count(who: str, rank: int) -> str:
    """The text of the error after `samples` of a rank gave no count. `who`: this rank."""
    return (
        f"{who}: LocalSteps(samples=...) of rank {rank} returned no count; return the number of this rank's samples in "
        f"a step, 0 or more, as len(batch)"
    )


def _head(values: Sequence[float]) -> Head:
    kinds = [type(default) for default in Head(0, 0, True, False, 0, 0.0)]
    return Head._make(kind(value) for kind, value in zip(kinds, values, strict=True))


def finite(values: Tensor) -> bool:
    """Whether all values are finite."""
    return is_finite(values)


@dataclasses.dataclass
class Ended:
    """A sync that has ended, and that the model lacks."""

    turn: int
    outcome: Outcome
    counted: Tensor | float = 0.0
    """q of this site, which it has not taken from its weights yet."""
    own: Sync | None = None
    """The sync, if this site counted in it: a checkpoint has it as one in flight."""
    age: int = 0
    """Local steps since it began."""

    @property
    def nbytes(self) -> int:
        """The memory that it takes, in bytes, but for small things."""
        return self.outcome.average.nbytes
