"""`Sampler`: which samples of a dataset are this rank's in each step, so that an epoch has each sample once.

An epoch is one order of all samples, drawn from the seed and its number. A batch is the next `batch_size` of them, and
each rank takes its share of the batch. Where ranks are rows that share a model, those of a row have equally many
samples: what is divided are groups of as many samples as a row has ranks. The place in the epoch moves when a step is
made, on all ranks alike. So the batch of a step that failed is shared anew by the ranks that live, and no sample gets
lost with a rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler as TorchSampler

from ...errors import ClosedError
from .shares import Speeds


class Loop(Protocol):
    """What a sampler needs of its job."""

    @property
    def left(self) -> bool: ...
    @property
    def number(self) -> int: ...
    @property
    def _rows(self) -> list[list[int]]: ...
    def _begin(self) -> None: ...
    def _end(self) -> None: ...
    def step(self) -> bool: ...


class Sampler(TorchSampler[list[int]]):
    """Made by `Job.sampler`: a batch sampler for torch's DataLoader. Each loop over it is the rest of an epoch."""

    def __init__(
        self, job: Loop, samples: int, batch_size: int, *, shuffle: bool, seed: int, by_speed: bool, row_size: int = 1
    ) -> None:
        """`row_size`: the ranks of a row. `samples` and `batch_size` are multiples of it."""
        self._job, self._row_size = job, row_size
        self._samples, self._batch_size = samples, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._epoch = self._place = 0
        self._speeds = Speeds(by_speed=by_speed)
        self._order: tuple[int, list[int]] = (-1, [])
        self._begun_s: float | None = None
        """When the batch of the step that is due was handed out; None: it was not."""

    @property
    def epoch(self) -> int:
        """The number of the present epoch, from 0."""
        return self._epoch

    @property
    def shares(self) -> dict[int, int]:
        """The samples of each member in a whole batch."""
        return self._shares(self._batch_size)

    def __len__(self) -> int:
        """Batches that are left of the epoch."""
        return -(-(self._samples - self._place) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of this rank's samples, step by step. Raises ClosedError if the loop did not call `step` for a
        batch."""
        epoch = self._epoch
        while self._epoch == epoch and not self._job.left:
            share = self._share()
            self._begun_s = time.perf_counter()
            if share:
                self._job._begin()
                yield share
                self._job._end()
            else:
                self._job.step()  # there are fewer samples than ranks

    def weight(self, ranks: int) -> float:
        """The factor of this rank's gradients in a plain average over `ranks`, with which it becomes the average over
        the samples of all ranks (`samples.weight_of`)."""
        if self._begun_s is None:
            raise ClosedError(
                f"rank {self._job.number}: step() without a batch of job.sampler(): take each batch from a loop over it"
            )
        return self.count * ranks / len(self._batch())

    def take(self, ranks: int) -> float:
        """The `weight`. The loop has computed its batch."""
        weight = self.weight(ranks)
        assert self._begun_s is not None  # noqa: S101
        if weight:
            self._speeds.note(self.count, time.perf_counter() - self._begun_s)
        self._begun_s = None
        return weight

    @property
    def count(self) -> int:
        """The samples of this rank in the batch that is due."""
        return self._shares(len(self._batch()))[self._job.number]

    @property
    def speed(self) -> float:
        """Samples per second, as this rank tells it to the others; 0: not measured."""
        return self._speeds.own

    def advance(self, speeds: dict[int, float]) -> None:
        """A step was made. `speeds`: what the members told in it."""
        self._place += len(self._batch())
        if self._place == self._samples:
            self._epoch, self._place = self._epoch + 1, 0
        slowest = {row[0]: min(speeds[each] for each in row) for row in self._job._rows if row[0] in speeds}
        self._speeds.advance(slowest, self._batch_size // self._row_size)

    def state(self) -> dict[str, Any]:
        """The place in the epoch and the agreed speeds, for `load`."""
        return {"epoch": self._epoch, "place": self._place, "speeds": self._speeds.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on at the place of another rank."""
        self._epoch, self._place = state["epoch"], state["place"]
        self._speeds.load(state["speeds"])

    def settings(self) -> dict[str, Any]:
        """What must be alike on all ranks, by name."""
        return {
            "the number of samples": self._samples,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "by_speed": self._speeds.by_speed,
        }

    def _batch(self) -> list[int]:
        """The samples of the step that is due."""
        if self._order[0] != self._epoch:
            # A seed of its own for each epoch, far from those of other seeds.
            draw = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
            order = (
                torch.randperm(self._samples, generator=draw, device="cpu")
                if self._shuffle
                else torch.arange(self._samples, device="cpu")
            )
            self._order = self._epoch, order.tolist()
        return self._order[1][self._place : self._place + self._batch_size]

    def _share(self) -> list[int]:
        batch, first = self._batch(), 0
        for member, count in self._shares(len(batch)).items():
            if member == self._job.number:
                return batch[first : first + count]
            first += count
        return []

    def _shares(self, total: int) -> dict[int, int]:
        """The samples of each member in a batch of `total`. Each row has its share, and its ranks equal parts of it."""
        rows = self._job._rows
        counts = self._speeds.shares([row[0] for row in rows], total // self._row_size)
        return {each: counts[row[0]] for row in rows for each in row}
