"""A plan: what one rank sends, receives, copies and reduces in one collective, as data.

A plan is an array of steps (`struct cl_step`) with a dependency count each, and the array of successors they share. It
names buffers, not addresses, and bytes, not elements: the same plan serves every tensor of that size. `PlanBuilder`
is how the algorithms write plans; the native executor runs them (and tests/unit/plans/interpreter.py, on numpy arrays).
"""

from __future__ import annotations

import dataclasses
import enum
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt


class StepKind(enum.IntEnum):
    """What a step does; values equal `enum cl_step_kind`."""

    SEND = 0
    RECV_COPY = 1
    RECV_REDUCE = 2
    COPY = 3
    REDUCE = 4
    SCALE = 5
    POST = 6
    AWAIT = 7


class Buffer(enum.IntEnum):
    """Where a step reads or writes; values equal `enum cl_buffer`."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2
    STAGING = 3


STEP = np.dtype(
    [
        ("kind", np.uint16),
        ("flags", np.uint16),
        ("peer", np.uint32),
        ("source", np.uint32),
        ("target", np.uint32),
        ("source_offset", np.uint64),
        ("target_offset", np.uint64),
        ("length", np.uint64),
        ("message", np.uint32),
        ("dependencies", np.uint32),
        ("successor_first", np.uint32),
        ("successor_count", np.uint32),
    ]
)
"""One step, byte for byte `struct cl_step`."""

FIELDS = [name for name in STEP.names or () if name != "flags"]
"""What makes a step what it is; the flags only say how."""

PARTIAL = 1
"""Flag of a network step: it may lose packets, up to the bound of the operation (CL_STEP_PARTIAL)."""

SCRATCH_ALIGNMENT_BYTES = 64

POSTS_LIMIT = 1 << 20
"""How far a plan may raise a host counter; equals CL_POSTS_LIMIT."""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One rank's part of one collective. Immutable: plans are cached and shared by every operation of their shape."""

    steps: npt.NDArray[Any]
    """Array of STEP. Every step comes after the steps it depends on."""
    successors: npt.NDArray[np.uint32]
    """Indices of steps; step s owns successors[successor_first : successor_first + successor_count]."""
    rank: int
    world_size: int
    scratch_bytes: int
    """Private memory the executor must provide as CL_SCRATCH."""
    staging_bytes: int
    """How much of each rank's staging this plan addresses, from offset 0."""
    posts: int
    """How far this rank's host counter rises from start to end; equal on all ranks of the operation."""
    partial: bool = False
    """Whether it has partial steps: such an all-reduce goes from INPUT to OUTPUT, the others are in place."""
    signature: int = 0
    """Of the collective as a whole, 32 bits, the same on all ranks, so that they can tell whether they called the same;
    0: they cannot."""


def sign(*called: object) -> int:
    """The signature for what was called."""
    return zlib.crc32(repr(called).encode()) or 1


class Chain:
    """Steps that run one after the other.

    Steps added within `with chain:` also wait for the chain's last step. A chain can be left and entered again, so
    steps that belong to no order can be added in between.
    """

    def __init__(self, builder: PlanBuilder) -> None:
        self.tail: tuple[int, ...] = ()
        """The last step, as something to pass as `after`; empty while the chain is."""
        self._builder = builder

    def __enter__(self) -> Chain:
        self._builder._chain = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._builder._chain = None


class PlanBuilder:
    """Collects the steps of one rank's plan.

    Every step method returns the step's index, to be named in the `after` of later steps. Offsets and lengths are
    bytes; lengths are positive: a generator skips empty ranges, on both sides of a message alike.

    Messages are numbered per peer and direction in the order of the calls: the n-th `send` from a to b in the plan of
    a is the n-th `recv_*` from a in the plan of b. So both plans must add the messages of a pair in the same order.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.posts = 0
        self._steps: list[tuple[int, int, int, int, int, int, int, int, int]] = []
        self._successors: list[list[int]] = []
        self._partial: list[int] = []
        self._sent = [0] * world_size
        self._received = [0] * world_size
        self._scratch_bytes = 0
        self._staging_bytes = 0
        self._chain: Chain | None = None

    def chain(self) -> Chain:
        """A new, empty chain."""
        return Chain(self)

    def scratch(self, length: int) -> int:
        """Reserves private memory; returns its offset in SCRATCH."""
        offset = self._scratch_bytes
        self._scratch_bytes += -(-length // SCRATCH_ALIGNMENT_BYTES) * SCRATCH_ALIGNMENT_BYTES
        return offset

    def send(
        self, peer: int, source: Buffer, offset: int, length: int, after: Sequence[int] = (), *, partial: bool = False
    ) -> int:
        """Sends a range to `peer`; done when the peer has acknowledged all of it.

        `partial`, here and at the receiver: part of it may be lost, up to the bound of the operation.
        """
        message = self._sent[peer]
        self._sent[peer] += 1
        return self._add(StepKind.SEND, peer, source, 0, offset, 0, length, message, after, partial)

    def recv_copy(
        self, peer: int, target: Buffer, offset: int, length: int, after: Sequence[int] = (), *, partial: bool = False
    ) -> int:
        """target = what `peer` sent."""
        message = self._received[peer]
        self._received[peer] += 1
        return self._add(StepKind.RECV_COPY, peer, 0, target, 0, offset, length, message, after, partial)

    def recv_reduce(
        self, peer: int, target: Buffer, offset: int, length: int, after: Sequence[int] = (), *, partial: bool = False
    ) -> int:
        """target = target (op) what `peer` sent, packet by packet in order of arrival."""
        message = self._received[peer]
        self._received[peer] += 1
        return self._add(StepKind.RECV_REDUCE, peer, 0, target, 0, offset, length, message, after, partial)

    def copy(
        self,
        source: Buffer,
        source_offset: int,
        target: Buffer,
        target_offset: int,
        length: int,
        after: Sequence[int] = (),
        *,
        staging_of: int | None = None,
    ) -> int:
        """target = source. STAGING is that of rank `staging_of`, by default this rank's own."""
        return self._move(StepKind.COPY, source, source_offset, target, target_offset, length, after, staging_of)

    def reduce(
        self,
        source: Buffer,
        source_offset: int,
        target: Buffer,
        target_offset: int,
        length: int,
        after: Sequence[int] = (),
        *,
        staging_of: int | None = None,
    ) -> int:
        """target = target (op) source. STAGING is that of rank `staging_of`, by default this rank's own."""
        return self._move(StepKind.REDUCE, source, source_offset, target, target_offset, length, after, staging_of)

    def scale(
        self, target: Buffer, offset: int, length: int, divisor: int, after: Sequence[int] = (), *, weight: int = 1
    ) -> int:
        """target = target / divisor. With lossy contributions also the place to rescale, so the divisor may be 1.

        `weight`: how many ranks each contribution that may be lost stands for.
        """
        return self._add(StepKind.SCALE, divisor, 0, target, 0, offset, length, weight, after)

    def post(self, after: Sequence[int] = ()) -> int:
        """Raises this rank's host counter by one; `posts` is then the value to await."""
        self.posts += 1
        return self._add(StepKind.POST, self.rank, 0, 0, 0, 0, 0, self.posts, after)

    def post_rest(self, after: Sequence[int] = ()) -> int:
        """Raises this rank's host counter to POSTS_LIMIT: the last post of a rank that cannot know how often others do.

        Whatever anybody awaits of it is done then.
        """
        self.posts = POSTS_LIMIT
        return self._add(StepKind.POST, self.rank, 0, 0, 0, 0, 0, self.posts, after)

    def await_(self, peer: int, value: int, after: Sequence[int] = ()) -> int:
        """Done once `peer`, on this host, has posted `value` times in this operation."""
        return self._add(StepKind.AWAIT, peer, 0, 0, 0, 0, 0, value, after)

    def build(self) -> Plan:
        """The finished plan."""
        count = len(self._steps)
        steps = np.zeros(count, STEP)
        if count:
            # One conversion of plain integers, then whole columns: several times faster than an array of tuples.
            columns = np.array(self._steps, np.int64).T
            for name, column in zip(FIELDS, columns, strict=False):
                steps[name] = column
            steps["flags"][self._partial] = PARTIAL
        lengths = np.fromiter(map(len, self._successors), np.int64, count)
        ends = np.cumsum(lengths)
        steps["successor_first"] = ends - lengths
        steps["successor_count"] = lengths
        edges = int(ends[-1]) if count else 0
        successors = np.fromiter((s for each in self._successors for s in each), np.uint32, edges)
        steps.flags.writeable = False
        successors.flags.writeable = False
        return Plan(
            steps,
            successors,
            self.rank,
            self.world_size,
            self._scratch_bytes,
            self._staging_bytes,
            self.posts,
            bool(self._partial),
        )

    def _move(
        self,
        kind: StepKind,
        source: Buffer,
        source_offset: int,
        target: Buffer,
        target_offset: int,
        length: int,
        after: Sequence[int],
        staging_of: int | None,
    ) -> int:
        if source == Buffer.STAGING:
            self._staging_bytes = max(self._staging_bytes, source_offset + length)
        if target == Buffer.STAGING:
            self._staging_bytes = max(self._staging_bytes, target_offset + length)
        peer = self.rank if staging_of is None else staging_of
        return self._add(kind, peer, source, target, source_offset, target_offset, length, 0, after)

    def _add(
        self,
        kind: StepKind,
        peer: int,
        source: int,
        target: int,
        source_offset: int,
        target_offset: int,
        length: int,
        message: int,
        after: Sequence[int],
        partial: bool = False,
    ) -> int:
        if length <= 0 and kind < StepKind.POST:
            raise ValueError(f"rank {self.rank}: a {kind.name} step of {length} bytes; skip empty ranges")
        index = len(self._steps)
        if self._chain is not None:
            after = (*after, *self._chain.tail)
            self._chain.tail = (index,)
        for step in after:
            self._successors[step].append(index)
        self._successors.append([])
        if partial:
            self._partial.append(index)
        self._steps.append((kind, peer, source, target, source_offset, target_offset, length, message, len(after)))
        return index
