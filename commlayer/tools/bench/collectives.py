"""The collectives that can be measured: their buffers, their call, their exact result, their bandwidth factor."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from . import pattern
from .collective import Collective
from .gradients import Gradients

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
# renamed in torch 2.13; the old names warn there, the new ones are missing before
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _wrapped(value: int, dtype: torch.dtype) -> torch.Tensor:
    """`value` modulo the range of the integer type `dtype`."""
    modulo = value % (1 << 64)
    return torch.tensor(modulo - (1 << 64) if modulo >= 1 << 63 else modulo, dtype=torch.int64).to(dtype)


class AllReduce(Collective):
    """An all-reduce in place, as in DDP. An error in any iteration survives to the check: later sums only scale it."""

    name = "all_reduce"
    reduces = True

    @property
    def bus_factor(self) -> float:
        return 2 * (self.world - 1) / self.world

    def prepare(self) -> None:
        self.source, self.buffer, self.expected = (self._new(self.count) for _ in range(3))
        self.runs = 0
        pattern.fill(self.source, self.rank, self.world, self.op)
        pattern.fill_reduced(self.expected, self.world, self.op)

    def restore(self) -> None:
        self.buffer.copy_(self.source)
        self.runs = 0

    def run(self, group: dist.ProcessGroup) -> None:
        self.runs += 1
        dist.all_reduce(self.buffer, _REDUCE_OPS[self.op], group)

    def chain(self) -> int:
        return pattern.exact_chain(self.world, self.dtype, self.op)

    def wrong(self) -> int:
        expected = self.expected
        if self.op == "sum":
            growth = self.world ** (self.runs - 1)
            exact = float(growth) if self.dtype.is_floating_point else _wrapped(growth, self.dtype)
            expected = expected * exact
        elif self.op == "product":
            for _ in range(self.runs - 1):
                expected = expected**self.world
        return self._mismatches(self.buffer, expected)


class ReduceScatter(Collective):
    name = "reduce_scatter"
    reduces = True
    sharded = True

    def prepare(self) -> None:
        self.source, self.result, self.expected = self._new(self.count), self._new(self.shard), self._new(self.shard)
        pattern.fill(self.source, self.rank, self.world, self.op)
        pattern.fill_reduced(self.expected, self.world, self.op, first=self.rank * self.shard)

    def run(self, group: dist.ProcessGroup) -> None:
        reduce_scatter_single(self.result, self.source, _REDUCE_OPS[self.op], group)


class AllGather(Collective):
    name = "all_gather"
    sharded = True

    def prepare(self) -> None:
        self.source, self.result, self.expected = self._new(self.shard), self._new(self.count), self._new(self.count)
        pattern.fill(self.source, self.rank, self.world, "sum")
        for rank in range(self.world):
            pattern.fill(self.expected[rank * self.shard : (rank + 1) * self.shard], rank, self.world, "sum")

    def run(self, group: dist.ProcessGroup) -> None:
        all_gather_single(self.result, self.source, group)


class Broadcast(Collective):
    """A broadcast from group rank 0."""

    name = "broadcast"

    def prepare(self) -> None:
        self.result, self.expected = self._new(self.count), self._new(self.count)
        pattern.fill(self.expected, 0, self.world, "sum")

    def restore(self) -> None:
        if self.rank == 0:
            self.result.copy_(self.expected)
        else:
            self.result.fill_(77)

    def run(self, group: dist.ProcessGroup) -> None:
        dist.broadcast(self.result, group=group, group_src=0)


class Reduce(Collective):
    """A reduce to group rank 0, in place there."""

    name = "reduce"
    reduces = True

    def prepare(self) -> None:
        self.source, self.result, self.expected = (self._new(self.count) for _ in range(3))
        pattern.fill(self.source, self.rank, self.world, self.op)
        pattern.fill_reduced(self.expected, self.world, self.op)

    def restore(self) -> None:
        self.result.copy_(self.source)

    def run(self, group: dist.ProcessGroup) -> None:
        dist.reduce(self.result, op=_REDUCE_OPS[self.op], group=group, group_dst=0)

    def chain(self) -> int:
        return 1  # the next one would start from the result at the root, and from inputs or leftovers elsewhere

    def wrong(self) -> int:
        return super().wrong() if self.rank == 0 else 0


class AllToAll(Collective):
    """The whole array is what one rank sends."""

    name = "all_to_all"
    sharded = True

    def prepare(self) -> None:
        self.source, self.result, self.expected = (self._new(self.count) for _ in range(3))
        own = slice(self.rank * self.shard, (self.rank + 1) * self.shard)
        for rank in range(self.world):
            pattern.fill(self.source, rank, self.world, "sum")
            self.expected[rank * self.shard : (rank + 1) * self.shard] = self.source[own]
        pattern.fill(self.source, self.rank, self.world, "sum")

    def run(self, group: dist.ProcessGroup) -> None:
        dist.all_to_all_single(self.result, self.source, group=group)


class Gather(AllGather):
    """A gather to group rank 0. The whole array is what the root receives."""

    name = "gather"

    def run(self, group: dist.ProcessGroup) -> None:
        parts = list(self.result.split(self.shard)) if self.rank == 0 else None
        dist.gather(self.source, parts, group=group, group_dst=0)

    def wrong(self) -> int:
        return super().wrong() if self.rank == 0 else 0


class Scatter(Collective):
    """A scatter from group rank 0. The whole array is what the root sends."""

    name = "scatter"
    sharded = True

    def prepare(self) -> None:
        self.source, self.result = self._new(self.count), self._new(self.shard)
        pattern.fill(self.source, 0, self.world, "sum")
        self.expected = self.source[self.rank * self.shard : (self.rank + 1) * self.shard]

    def run(self, group: dist.ProcessGroup) -> None:
        parts = list(self.source.split(self.shard)) if self.rank == 0 else None
        dist.scatter(self.result, parts, group=group, group_src=0)


class SendRecv(Collective):
    """Every rank sends to the next one and receives from the one before, at the same time."""

    name = "sendrecv"

    def prepare(self) -> None:
        self.source, self.result, self.expected = (self._new(self.count) for _ in range(3))
        self.to, self.origin = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        pattern.fill(self.source, self.rank, self.world, "sum")
        pattern.fill(self.expected, self.origin, self.world, "sum")

    def run(self, group: dist.ProcessGroup) -> None:
        if self.world == 1:
            self.result.copy_(self.source)  # torch has no messages to oneself
            return
        operations = [
            dist.P2POp(dist.isend, self.source, group=group, group_peer=self.to),
            dist.P2POp(dist.irecv, self.result, group=group, group_peer=self.origin),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class PingPong(Collective):
    """Ranks 0 and 1, 2 and 3, and so on: the first sends its array, the second answers with its own. Half of a run's
    time is the latency of one message. A last rank without a partner has nothing to do."""

    name = "pingpong"

    @property
    def bus_factor(self) -> float:
        return 2.0  # one array after the other

    def prepare(self) -> None:
        self.source, self.result, self.expected = (self._new(self.count) for _ in range(3))
        self.partner = self.rank ^ 1 if self.rank ^ 1 < self.world else self.rank
        pattern.fill(self.source, self.rank, self.world, "sum")
        pattern.fill(self.expected, self.partner, self.world, "sum")

    def run(self, group: dist.ProcessGroup) -> None:
        if self.partner == self.rank:
            self.result.copy_(self.source)
        elif self.rank < self.partner:
            dist.send(self.source, group=group, group_dst=self.partner)
            dist.recv(self.result, group=group, group_src=self.partner)
        else:
            dist.recv(self.result, group=group, group_src=self.partner)
            dist.send(self.source, group=group, group_dst=self.partner)


class Window(Collective):
    """Ranks 0 and 1, 2 and 3, and so on: the first sends several arrays without waiting for any, as a pipeline does,
    and the second answers with one element when it has all of them."""

    name = "window"
    messages: ClassVar[int] = 8

    @property
    def bus_factor(self) -> float:
        return float(self.messages)

    def prepare(self) -> None:
        self.sends = self.rank % 2 == 0
        self.partner = self.rank ^ 1 if self.rank ^ 1 < self.world else self.rank
        self.source = self._new(self.count)
        self.result, self.expected = (self._new(self.messages * self.count) for _ in range(2))
        self.answer = self._new(1).fill_(1)
        pattern.fill(self.source, self.rank, self.world, "sum")
        for part in self.expected.split(self.count):
            pattern.fill(part, self.partner, self.world, "sum")

    def run(self, group: dist.ProcessGroup) -> None:
        if self.partner == self.rank:
            return
        if self.sends:
            works = [dist.isend(self.source, group=group, group_dst=self.partner) for _ in range(self.messages)]
            dist.recv(self.answer, group=group, group_src=self.partner)
        else:
            parts = self.result.split(self.count)
            works = [dist.irecv(part, group=group, group_src=self.partner) for part in parts]
        for work in works:
            if work is not None:
                work.wait()
        if not self.sends:
            dist.send(self.answer, group=group, group_dst=self.partner)

    def wrong(self) -> int:
        return 0 if self.sends or self.partner == self.rank else super().wrong()


class Barrier(Collective):
    """Latency only: there is no data, hence no bandwidth and nothing to be wrong."""

    name = "barrier"

    @property
    def bus_factor(self) -> float:
        return 0.0

    def prepare(self) -> None:
        self.count = 0

    def restore(self) -> None:
        pass

    def run(self, group: dist.ProcessGroup) -> None:
        dist.barrier(group)

    def wrong(self) -> int:
        return 0


COLLECTIVES: dict[str, type[Collective]] = {
    kind.name: kind
    for kind in (
        *(
            AllReduce,
            ReduceScatter,
            AllGather,
            Broadcast,
            Reduce,
            AllToAll,
            Gather,
            Scatter,
            SendRecv,
            PingPong,
            Window,
            Barrier,
        ),
        Gradients,
    )
}
