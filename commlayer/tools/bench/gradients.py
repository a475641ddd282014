"""All-reduce of a bucket of gradients, like that of DDP's communication hook: plain, cast, in chunks, or lossy.

Every run starts from the same gradients, and its result is checked by itself. With losses there is no single right
result, and a chain of runs would hide the wrong one. The runs of a stretch have a bucket each, and all are checked at
its end: a rank that checks would otherwise keep the others waiting inside their clocks.

Each rank has bits of its own in a value: contribution r is v << (bits x r), so that a sum shows the ranks in it. A
result is wrong if it is no sum of contributions, each whole or absent; if this rank's own part is absent but not among
the missing contributions that the rank was told; or if a contribution was lost twice in a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.feedback import Added, Feedback
from ...frontend.gradients.gradient import Reduction, reduce_gradient
from ...frontend.gradients.reducer import Missing
from ...frontend.group.backend import CommProcessGroup
from . import pattern
from .collective import Collective

_BITS_MAX = 5
"""Bits per rank: with four ranks, means of float32 can still be told apart."""

_RUNS = 4
"""Runs in a stretch."""


class NotedFeedback(Feedback):
    """Notes the contributions that the last run added and lost."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[tuple[int, int]] = []
        self.missing: Missing = []

    def add_to(
        self,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        starts: Sequence[int],
        outside: tuple[int, int] | None = None,
    ) -> Added:
        added = super().add_to(buffer, parameters, starts, outside)
        self.added, self.missing = added.late, []  # of a run that loses nothing, `keep` may not be called
        return added

    def keep(
        self, buffer: Tensor, parameters: Sequence[Tensor], starts: Sequence[int], missing: Sequence[tuple[int, int]]
    ) -> None:
        self.missing = list(missing)
        super().keep(buffer, parameters, starts, missing)


@dataclasses.dataclass
class _Part:
    """A stretch of the bucket that is one operation, in one run."""

    bucket: Tensor
    source: Tensor
    """The contribution on the wire: the bucket itself, or a copy in the wire's dtype."""
    target: Tensor
    """Memory for the result."""
    feedback: NotedFeedback
    """The same for all runs."""
    owner: Tensor
    """Stands for the parameter, in every run."""
    again: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(start, end) in elements of the contributions that the run before lost."""
    missing: Missing = dataclasses.field(default_factory=list)
    """(offset, length) in bytes of the contributions in `source` that the run lost."""


@functools.lru_cache
def _digits(count: int, dtype: torch.dtype, rank: int, world: int, bits: int, largest: int) -> tuple[Tensor, Tensor]:
    """This rank's gradients and the sum of all ranks'; many backends share them."""
    source, expected = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
    pattern.fill_digits(source, expected, rank, world, bits, largest)
    return source, expected


@functools.lru_cache
def _memory(count: int, dtype: torch.dtype, use: str) -> Tensor:  # noqa: ARG001  # part of the key
    """Memory that all backends share, because they take turns: each stretch fills it anew."""
    return torch.zeros(count, dtype=dtype)


class Gradients(Collective):
    """The measurement for one backend, whose settings give the dtype on the wire, the chunks and the policy."""

    name = "gradients"
    reduces = True
    per_backend = True

    @property
    def bus_factor(self) -> float:
        return 2 * (self.world - 1) / self.world

    @property
    def feeds_back(self) -> bool:
        """Whether lost contributions are added to the next run."""
        return self.spec.policy.loss_bound > 0 and self.spec.policy.treatment == "feedback"

    def prepare(self) -> None:
        wire = self.dtype if self.spec.cast is None else getattr(torch, self.spec.cast)
        self.bits = min(_BITS_MAX, (pattern.EXACT_INTEGER_LIMIT[wire].bit_length() - 1) // self.world)
        if self.bits == 0:
            raise ValueError(
                f"{self.world} ranks: {wire} has no bit for each, so sums cannot be verified; use fewer ranks"
            )
        # a lost contribution is added to the next one, once: a digit must hold twice its value
        largest = max(1, ((1 << self.bits) - 1) // (2 if self.feeds_back else 1))
        self.source, self.expected = _digits(self.count, self.dtype, self.rank, self.world, self.bits, largest)
        self.runs = 0
        self.lost = 0
        self.used = 0  # runs since the buckets were restored
        self.buckets = [_memory(self.count, self.dtype, f"bucket {run}") for run in range(_RUNS)]
        self.results = self.buckets
        if self.feeds_back and not self.spec.cast:  # DDP takes a result where it is
            self.results = [_memory(self.count, self.dtype, f"target {run}") for run in range(_RUNS)]
        kept = [(NotedFeedback(), piece) for piece in self.source.chunk(self.spec.chunks)]
        self.parts = [self._parts(run, wire, kept) for run in range(_RUNS)]

    def _parts(self, run: int, wire: torch.dtype, kept: list[tuple[NotedFeedback, Tensor]]) -> list[_Part]:
        def pieces(use: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
            return _memory(self.count, dtype, f"{use} {run}").chunk(self.spec.chunks)

        buckets = sources = targets = self.buckets[run].chunk(self.spec.chunks)
        if self.spec.cast:
            sources = targets = pieces("source", wire)
        if self.feeds_back:
            targets = pieces("target", wire)
        parts = zip(buckets, sources, targets, kept, strict=True)
        return [_Part(bucket, source, target, *keeps) for bucket, source, target, keeps in parts]

    def chain(self) -> int:
        return _RUNS

    def restore(self) -> None:
        self.used = 0
        for bucket, result in zip(self.buckets, self.results, strict=True):
            result.zero_()
            bucket.copy_(self.source)

    def run(self, group: dist.ProcessGroup) -> None:
        parts = self.parts[self.used]
        self.used += 1
        self.runs += 1
        works = [self._start(part, group) for part in parts]
        for part, work in zip(parts, works, strict=True):
            work.wait()
            self._finish(part)

    def _start(self, part: _Part, group: dist.ProcessGroup) -> Any:
        if part.source is not part.bucket:
            part.source.copy_(part.bucket)
        if not self.feeds_back:
            return dist.all_reduce(part.source, group=group, async_op=True)
        assert isinstance(group, CommProcessGroup)  # noqa: S101  # only its policy has a loss bound
        if not group.can_lose:
            part.target.copy_(part.source)
            return dist.all_reduce(part.target, group=group, async_op=True)
        memory = {(0, "target"): part.target}
        reduction = Reduction(group, part.feedback, memory=memory, op=dist.ReduceOp.SUM)
        return reduce_gradient(part.source, [part.owner], self.spec.policy, reduction)

    def _finish(self, part: _Part) -> None:
        if self.feeds_back:
            part.again, part.missing = part.feedback.added, part.feedback.missing
        if self.spec.cast:
            part.bucket.copy_(part.target)

    def wrong(self) -> int:
        """Wrong elements of the runs since `restore`; also adds the contributions that their results lack to `lost`."""
        return sum(self._wrong(run) for run in range(self.used))

    def _wrong(self, run: int) -> int:
        found = self.results[run]
        differs = (found != self.expected).nonzero().flatten()
        if not len(differs) and not self.feeds_back:
            return 0
        if self.spec.policy.loss_bound == 0:
            return len(differs)
        result, whole = found[differs].double(), self.expected[differs].long()
        rescales = self.spec.policy.treatment == "rescale"
        good, absent = self._rescaled(result, whole) if rescales else self._summed(result, whole)
        self.lost += int(absent.sum())
        wrong = int((~good).sum())
        return max(wrong, sum(map(self._unaccounted, self.parts[run]))) if self.feeds_back else wrong

    def _summed(self, result: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each element is a sum of contributions, and the number of contributions absent from it."""
        value, absent = result.round().long(), torch.zeros_like(whole)
        good = (value == result) & (value >= 0) & (value >> self.bits * self.world == 0)
        for digit, one in zip(self._digits(value), self._digits(whole), strict=True):
            good &= (digit % one == 0) if self.feeds_back else (digit == 0) | (digit == one)
            absent += digit == 0
        return good & (absent < self.world), absent  # the owner's own is always there

    def _rescaled(self, result: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the mean of the counted contributions x the number of ranks."""
        digits = [digit << self.bits * rank for rank, digit in enumerate(self._digits(whole))]
        good, absent = torch.zeros_like(whole, dtype=torch.bool), torch.zeros_like(whole)
        tolerance = 4 * torch.finfo(getattr(torch, self.spec.cast or "float32")).eps
        fewest_absent_first = sorted(range(1, 1 << self.world), key=lambda subset: -bin(subset).count("1"))
        for subset in fewest_absent_first:
            there = [digit for rank, digit in enumerate(digits) if subset >> rank & 1]
            exact = torch.stack(there).sum(0) * (self.world / len(there))
            fits = ~good & ((result - exact).abs() <= tolerance * exact)
            absent[fits] = self.world - len(there)
            good |= fits
        return good, absent

    def _digits(self, value: Tensor) -> Iterator[Tensor]:
        mask = (1 << self.bits) - 1
        return (value >> self.bits * rank & mask for rank in range(self.world))

    def _unaccounted(self, part: _Part) -> int:
        """Elements in which this rank's own contribution differs from what it was told, or was lost again."""
        told = torch.ones(len(part.source), dtype=torch.bool)
        for offset, length in part.missing:
            told[offset // part.source.itemsize : (offset + length) // part.source.itemsize] = False
        wrong = sum(int((~told[start:end]).sum()) for start, end in part.again)
        result = part.bucket if self.spec.cast else part.target
        digit = result.long() >> self.bits * self.rank & (1 << self.bits) - 1
        return wrong + int((digit << self.bits * self.rank != part.source.long() * told).sum())

    @property
    def not_counted(self) -> float:
        """Share of the contributions of all runs so far that the results on this rank lack."""
        return self.lost / (self.world * self.count * self.runs) if self.runs else 0.0
