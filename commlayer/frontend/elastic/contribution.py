"""`Contribution`: what this rank gives to the averages of one step. They travel bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ..group.parts import part_of
from .averages import Averages, Bucket, Told


class Contribution:
    """All ranks start the same buckets, in the same order: those but the last one by `start`, or all by `finish`."""

    def __init__(self, averages: Averages, ranks: int, weight: float, average: Callable[[Tensor], Any]) -> None:
        """`ranks`: those that tell something in the vector. `weight`: that of this rank's gradients. `average` starts
        an average over all rows, in place."""
        self.vector = averages.vector(ranks)
        """The averages, once `works` and that of the rest have ended."""
        self.works = list[Any]()
        """Those of the buckets that were started."""
        self._averages, self._weight, self._average = averages, weight, average
        self._begun = 0
        self._error: Exception | None = None
        self._taken: list[tuple[nn.Parameter, Tensor | None, int, Tensor | None]] = []

    @property
    def next(self) -> Bucket | None:
        """The bucket that `start` starts; None: only the last one is left."""
        buckets = self._averages.buckets
        return buckets[self._begun] if self._begun < len(buckets) - 1 else None

    def start(self) -> None:
        """Takes the gradients of the next bucket, and starts their average. An error is raised by `finish`."""
        bucket = self.next
        assert bucket is not None  # noqa: S101
        self._averages.fill(self.vector, bucket, self._weight)
        self._take(bucket)
        self._begun += 1
        if self._error is None:
            try:
                self.works.append(self._average(self.vector[bucket.begin : bucket.end]))
            except Exception as error:
                self._error = error

    def seal(self) -> None:
        """The backward pass has ended, and all buckets but the last one have started: from now on, a change of any
        gradient is an error, so that it does not depend on the size of the model."""
        self._take(self._averages.buckets[-1])

    def _take(self, bucket: Bucket) -> None:
        self._taken += [(each, each.grad, _version(each.grad), _sample(each.grad)) for each in bucket.parameters]

    def finish(self, place: int, told: Told | None) -> Bucket:
        """Starts the buckets that are left, but for the last one, which it returns: the caller averages that, and all
        behind it in the vector. `place`: that of this rank among the members, whom it tells `told`; None: it does so
        otherwise. Raises ConfigError if gradients have changed since they were taken."""
        for parameter, gradient, version, sample in self._taken:
            now = _sample(gradient)
            is_same = sample is None or now is None or torch.equal(sample, now)
            if parameter.grad is not gradient or _version(gradient) != version or not is_same:
                raise ConfigError(
                    f"elastic: a gradient of shape {tuple(parameter.shape)} was changed between the backward pass and "
                    f"job.step(), when gradients were already on their way to the other ranks: clip by "
                    f"elastic(clip_norm=...), or send all gradients in job.step() by elastic(overlap=False)"
                )
        while self.next is not None:
            self.start()
        if self._error is not None:
            raise self._error
        last = self._averages.buckets[-1]
        self._averages.fill(self.vector, last, self._weight)
        self._averages.tell(self.vector, self._weight, place, told)
        return last


SAMPLED = 64
"""Values of a gradient that show a change which torch does not count, as by `.data` or by numpy."""


def _sample(tensor: Tensor | None) -> Tensor | None:
    """The bits of some values."""
    part = None if tensor is None else part_of(tensor)
    if part is None or not part.is_contiguous():
        return None
    values = part.detach().view(-1)
    return values[:: max(1, len(values) // SAMPLED)].clone().view(torch.int32)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version
