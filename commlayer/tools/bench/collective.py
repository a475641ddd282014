"""`Collective`: one measurement at one size, its buffers, its call and its exact result.

Bandwidth follows nccl-tests (doc/PERFORMANCE.md): algbw = S / t with S the size of the whole array, busbw = algbw x bus
factor, which makes busbw comparable to a link's rate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.distributed as dist

from .spec import BackendSpec

ANY = BackendSpec("any")


class Collective(ABC):
    """One collective with this rank's buffers."""

    name: ClassVar[str]
    result: torch.Tensor
    expected: torch.Tensor
    reduces: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    """Whether the array has equal parts, one per rank."""
    per_backend: ClassVar[bool] = False
    """Whether the backend's settings change the call, so that each backend needs its own buffers."""

    def __init__(
        self, size_bytes: int, dtype: torch.dtype, op: str, rank: int, world: int, spec: BackendSpec | None = None
    ) -> None:
        """`spec`: the backend of a collective that is `per_backend`."""
        self.spec = spec or ANY
        self.rank = rank
        self.world = world
        self.op = op
        # whole elements per rank, rounded down as in nccl-tests
        self.shard = max(1, size_bytes // dtype.itemsize // world)
        self.count = self.shard * world if self.sharded else max(1, size_bytes // dtype.itemsize)
        self.dtype = dtype
        self.prepare()

    @property
    def size_bytes(self) -> int:
        """Size of the whole array, from which algbw is computed."""
        return self.count * self.dtype.itemsize

    @property
    def bus_factor(self) -> float:
        """busbw / algbw: the share of the whole array that crosses a rank's link."""
        return (self.world - 1) / self.world if self.sharded else 1.0

    @abstractmethod
    def prepare(self) -> None:
        """Allocates the buffers and computes the exact result."""

    def restore(self) -> None:
        """Puts the input back and spoils the output, so that an old result cannot pass for a new one."""
        self.result.fill_(77)

    @abstractmethod
    def run(self, group: dist.ProcessGroup) -> None:
        """The call that is timed; blocks until the result is there."""

    def wrong(self) -> int:
        """Wrong elements of this rank's results since `restore`. The last run's result is enough where each run starts
        from the result of the run before."""
        return self._mismatches(self.result, self.expected)

    def chain(self) -> int:
        """Number of runs after one `restore` whose results are exact and have space."""
        return 1 << 30

    @property
    def not_counted(self) -> float | None:
        """Share of the contributions missing from this rank's results; None if nothing may be lost."""
        return None

    def _new(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self.dtype)

    def _mismatches(self, result: torch.Tensor, expected: torch.Tensor) -> int:
        return int((result != expected).sum())
