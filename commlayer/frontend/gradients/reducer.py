"""`Reducer`: the average of one buffer of gradients, in one form; `Buffer`: what it averages.

Each form of a codec (`compress.codec.Form`) has a reducer: exact.py, encoded.py, selected.py and low_rank.py. Only
`gradient.py` chooses among them.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, Work
from torch.futures import Future

from ...compress.codec import Codec
from ...compress.feedback import Added, Feedback
from ...compress.fine import Fine
from ...config import Policy
from ...loss.protect import as_words, blocks_of
from ..group.backend import CommProcessGroup
from ..work.work import CommWork, join

if TYPE_CHECKING:
    from .low_rank import LowRank

Missing = list[tuple[int, int]]
"""(offset, length) in bytes of contributions that were not counted."""

NARROW = (torch.float16, torch.complex32)
"""The types whose sums would overflow where their averages do not: 8 ranks with 10,000 make more than 65,504."""


def divide_first(values: Tensor, group: dist.ProcessGroup) -> int:
    """Divides values of a NARROW type by the number of the group's ranks, in place, so that their sum is the average.
    Returns that number, or 1 for values that it leaves alone."""
    if values.dtype not in NARROW:
        return 1
    real(values).div_(group.size())
    return group.size()


def real(values: Tensor) -> Tensor:
    """The values as real numbers, in the same memory: few operations and groups know all complex types."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values


@dataclasses.dataclass
class Buffer:
    """One buffer of gradients in one step."""

    group: CommProcessGroup
    source: Tensor
    """Flat, on the CPU; with a codec float32. Earlier steps' residuals have been added."""
    parameters: Sequence[Tensor]
    starts: Sequence[int]
    """The element where each parameter's gradient begins."""
    numbers: Sequence[int]
    """The parameters' numbers in `Feedback`."""
    codec: Codec
    policy: Policy
    """The policy of this buffer in this step, with its class, codec and loss bound."""
    protected: list[tuple[int, int]]
    """(start, end) in elements of what must not be lost."""
    key: int
    """Another one for each buffer and step; the lowest 16 bits are 0."""
    fine: Fine
    low_rank: LowRank
    """The state of low-rank reductions."""
    op: dist.ReduceOp.RedOpType
    host: Callable[[int], Tensor]
    """Host memory of so many values of the source's type, which is this buffer's until its next step."""

    @property
    def may_lose(self) -> bool:
        """Whether contributions may be lost."""
        return self.group.can_lose and self.policy.loss_bound > 0

    @property
    def feeds_back(self) -> bool:
        """Whether lost contributions are added to the next step's gradient."""
        return self.may_lose and self.policy.treatment == "feedback"


class Reducer(abc.ABC):
    """A reduction. Each buffer has one per step, which begins when it is made."""

    adds_factor_errors: ClassVar[bool] = True
    """Whether errors that low-rank factors left in earlier steps are to be added to the buffer first."""

    keeps: bool
    """Whether it leaves anything for the next step."""

    @abc.abstractmethod
    def __init__(self, buffer: Buffer) -> None:
        """Submits the first operations."""

    @abc.abstractmethod
    def future(self) -> Future[list[Tensor]]:
        """Completes, on any thread, when all operations have ended."""

    @abc.abstractmethod
    def failure(self) -> BaseException | None:
        """The error of the first operation that failed."""

    @abc.abstractmethod
    def spans(self) -> list[tuple[float, float]]:
        """(start, end) of the operations, which have ended; seconds of `time.perf_counter`."""

    @abc.abstractmethod
    def finish(self) -> Missing:
        """Called after the operations. Returns the ranges that were not counted."""

    @abc.abstractmethod
    def averages(self) -> Sequence[Tensor]:
        """All values of the average, after `finish`: they tell whether it is finite."""

    @abc.abstractmethod
    def result(self) -> Tensor:
        """The average, like the source; after `keep`, as it may take the memory of the source."""

    @abc.abstractmethod
    def keep(self, feedback: Feedback, added: Added) -> None:
        """Keeps what this step leaves for the next one, once the step is known to count. `added`: the residual that was
        in the buffer, and is forgotten already."""


class Operations(Reducer):
    """A reducer whose operations are all submitted at once."""

    def __init__(self, buffer: Buffer, target: Tensor) -> None:
        """`target`: the memory of the average; may be the source."""
        self.buffer, self.target = buffer, target
        self.missing: Missing = []
        self.rounded: Missing = []
        """The ranges of contributions with rounding errors, which are in the source."""
        self._works: list[tuple[int | None, Work]] = []
        """Each work, with the element of the buffer where it begins, or None for values packed elsewhere."""
        self._start_s = time.perf_counter()

    def add(self, start: int | None, work: Work) -> None:
        """Enters an operation, see `_works`."""
        self._works.append((start, work))

    def all_reduce(self, start: int, target: Tensor, key: int, *, from_source: bool) -> None:
        """Starts the all-reduce of as many elements of the source, from `start` on, as `target` has: in place, or from
        the source into the target."""
        buffer, policy, group = self.buffer, self.buffer.policy, self.buffer.group
        end = start + len(target)
        source, options = buffer.source[start:end], self.options()
        if buffer.may_lose and (from_source or buffer.protected):
            inside = [(max(a, start) - start, min(b, end) - start) for a, b in buffer.protected]
            protect = as_words(blocks_of(inside, source, group.packet_bytes))
            work: Work = group.allreduce_from(source, target, options, protect, policy=policy, key=key)
        elif from_source:
            work = group.allreduce_from(source, target, options, None, policy=policy, key=key)
        else:
            work = group.allreduce([source], options, policy=policy)
        self.add(start, work)

    def options(self) -> AllreduceOptions:
        """Those of an all-reduce with the buffer's operation."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(self.buffer.op)
        return options

    def future(self) -> Future[list[Tensor]]:
        works = [work for _, work in self._works]
        joined = works[0] if len(works) == 1 else join([work for work in works if isinstance(work, CommWork)])
        return joined.get_future()

    def failure(self) -> BaseException | None:
        errors = (work.exception() for _, work in self._works if isinstance(work, CommWork))
        return next((error for error in errors if error is not None), None)

    def spans(self) -> list[tuple[float, float]]:
        return [(self._start_s, time.perf_counter())]

    def finish(self) -> Missing:
        itemsize = self.buffer.source.itemsize
        for start, work in self._works:
            if isinstance(work, CommWork) and start is not None:  # else gloo's, which loses nothing
                self.missing += [(offset + start * itemsize, length) for offset, length in work.missing()]
                self.rounded += [(offset + start * itemsize, length) for offset, length in work.kept]
        return self.missing

    def averages(self) -> Sequence[Tensor]:
        return [self.target]

    def result(self) -> Tensor:
        return self.target
