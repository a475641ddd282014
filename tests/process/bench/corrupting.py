"""A backend that adds 1 to one element of every all-reduce on rank 1: `--import tests.process.bench.corrupting`."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

FIRST_CORRUPTED_RUN = 4
"""A run after the start: an error in the middle of a round must be found too."""


class CorruptingGroup(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        # the stub has another constructor than the binding
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.inner: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self.inner)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self.runs = 0

    def allreduce(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]  # as dist.all_reduce calls it
        work = self.inner.allreduce(tensors, opts)
        work.wait()
        self.runs += tensors[0].numel() > 1
        if self.inner.rank() == 1 and self.runs == FIRST_CORRUPTED_RUN:
            tensors[0][tensors[0].numel() // 2] += 1
        return work


def create(store: Any, rank: int, size: int, timeout: timedelta) -> CorruptingGroup:
    return CorruptingGroup(store, rank, size, timeout)


dist.Backend.register_backend("corrupting", create, devices=["cpu"])
