"""Bulk traffic of the job itself, which a small, urgent operation has to overtake."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

IN_FLIGHT = 2
"""Operations in flight: one runs while the next one starts."""


class Beside:
    """`with Beside(group, control, size_bytes):` runs all-reduces of this size in `group`, one after another.

    The caller calls `top_up` more often than they end. `control` is another group of the same ranks.
    """

    def __init__(self, group: dist.ProcessGroup, control: dist.ProcessGroup, size_bytes: int) -> None:
        self.wrong = 0
        """Wrong elements on this rank at the end."""
        self._group, self._control = group, control
        self._buffers = [torch.empty(max(1, size_bytes // 4)) for _ in range(IN_FLIGHT)]
        self._in_flight: deque[Any] = deque()
        self._started = 0

    def __enter__(self) -> Beside:
        for buffer in self._buffers:
            buffer.fill_(self._control.rank())
        self.wrong = self._started = 0
        for _ in self._buffers:
            self._start()
        return self

    def top_up(self) -> None:
        """Starts an all-reduce for each one that has ended."""
        for _ in self._buffers:  # bounded: all-reduces may end at once
            if self._in_flight[0].is_completed():
                self._in_flight.popleft().wait()
                self._start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            return
        most = torch.tensor([self._started])
        dist.all_reduce(most, dist.ReduceOp.MAX, self._control)  # ranks may have started different numbers
        while self._started < int(most):
            self._start()
        while self._in_flight:
            self._in_flight.popleft().wait()
        self.wrong = sum(int((buffer != self._control.size() - 1).sum()) for buffer in self._buffers)

    def _start(self) -> None:
        buffer = self._buffers[self._started % IN_FLIGHT]
        # a maximum stays exact over any number of all-reduces
        work = dist.all_reduce(buffer, dist.ReduceOp.MAX, self._group, async_op=True)
        self._in_flight.append(work)
        self._started += 1
