"""A plan: the steps of one rank in one collective, as data.

A plan is an array of steps (`struct cl_step`) with a dependency count each, and the array of their successors. It names
buffers, not addresses, and bytes, not elements: the same plan serves every tensor of that size. The algorithms write
plans with `PlanBuilder`. The native executor runs them, and tests/unit/plans/interpreter.py does so on numpy arrays.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .codec import KEEP, Encoding


class StepKind(enum.IntEnum):
    """The kinds of steps; values equal `enum cl_step_kind`."""

    SEND = 0
    RECV_COPY = 1
    RECV_REDUCE = 2
    COPY = 3
    REDUCE = 4
    SCALE = 5
    POST = 6
    AWAIT = 7
    ENCODE = 8
    TELL = 9
    CHECK = 10


INSTANTS = (StepKind.POST, StepKind.AWAIT, StepKind.TELL, StepKind.CHECK)
"""The kinds of steps without a range."""


class Buffer(enum.IntEnum):
    """The memory that a step reads or writes; values equal `enum cl_buffer`."""

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
        ("block", np.uint32),
        ("factor", np.uint32),
    ]
)
"""One step, byte for byte `struct cl_step`."""

FIELDS = [name for name in STEP.names or () if name != "flags"]
"""The columns of a step, except its flags."""

PARTIAL = 1
"""Flag of a network step: it may lose packets, up to the loss bound of the operation (CL_STEP_PARTIAL)."""

SCRATCH_ALIGNMENT_BYTES = 64

NUMBER_BYTES = 8
"""Bytes of a number in staging."""

POSTS_LIMIT = 1 << 20
"""Limit of a host counter in a plan; equals CL_POSTS_LIMIT."""


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
    """Private memory that the executor must provide as CL_SCRATCH."""
    staging_bytes: int
    """Bytes of each rank's staging that this plan addresses, from offset 0."""
    posts: int
    """Rise of this rank's host counter from start to end; equal on all ranks of the operation."""
    partial: bool = False
    """Whether some rank has partial steps. Such an all-reduce goes from INPUT to OUTPUT, as encoded ones; others are in
    place."""
    encodes: bool = False
    """Whether some rank has steps with a codec: it works on float32."""
    kept: tuple[tuple[int, int], ...] = ()
    """(offset, length) in bytes of the ranges of INPUT that in the end hold this rank's part of what did not arrive."""
    weights: tuple[int, ...] = ()
    """The hosts' weights, as in `Settings.weights`; (): their shards are equal."""
    signature: int = 0
    """32 bits that identify the collective: ranks with different signatures get MismatchError. 0: not compared."""


def sign(*called: object) -> int:
    """The signature of a call: its 32-bit checksum, not 0."""
    return zlib.crc32(repr(called).encode()) or 1


class Chain:
    """Steps that run one after the other.

    Steps added within `with chain:` also wait for the chain's last step. A chain can be left and entered again, so
    steps that belong to no order can be added in between.
    """

    def __init__(self, builder: PlanBuilder) -> None:
        self.tail: tuple[int, ...] = ()
        """The last step, to pass as `after`; empty while the chain is empty."""
        self._builder = builder

    def __enter__(self) -> Chain:
        self._builder._chain = self
        return self

    def __exit__(self, *_: object) -> None:
        self._builder._chain = None


class PlanBuilder:
    """Collects the steps of one rank's plan.

    Every step method returns the step's index, for the `after` of later steps. Offsets and lengths are in bytes.
    Lengths are positive: an algorithm skips empty ranges, on both ends of a message alike.

    Messages are numbered per peer and direction in the order of the calls: the n-th `send` from a to b in the plan of
    a is the n-th `recv_*` from a in the plan of b. So both plans must add the messages of a pair in the same order.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.posts = 0
        self._steps: list[tuple[int, int, int, int, int, int, int, int, int]] = []
        self._successors: list[list[int]] = []
        self._flags: list[int] = []
        self._encoded: list[tuple[int, int, int]] = []  # step, block, factor
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
        self,
        peer: int,
        source: Buffer,
        offset: int,
        length: int,
        after: Sequence[int] = (),
        *,
        partial: bool = False,
        encoding: Encoding | None = None,
        values: int = 0,
    ) -> int:
        """Sends a range to `peer`; done when the peer has acknowledged all of it.

        `partial`, here and at the receiver: part of it may be lost, up to the loss bound of the operation. `encoding`,
        here and at the receiver: `length` bytes of float32, from `values` of INPUT on, lie encoded at `offset`.
        """
        message = self._sent[peer]
        self._sent[peer] += 1
        return self._add(
            StepKind.SEND,
            peer,
            length,
            after,
            source=source,
            source_offset=offset,
            target_offset=values,
            message=message,
            partial=partial,
            encoding=encoding,
        )

    def recv_copy(
        self,
        peer: int,
        target: Buffer,
        offset: int,
        length: int,
        after: Sequence[int] = (),
        *,
        partial: bool = False,
        encoding: Encoding | None = None,
        kind: StepKind = StepKind.RECV_COPY,
    ) -> int:
        """target = the message of `peer`."""
        message = self._received[peer]
        self._received[peer] += 1
        return self._add(
            kind,
            peer,
            length,
            after,
            target=target,
            target_offset=offset,
            message=message,
            partial=partial,
            encoding=encoding and encoding._replace(keeps=False),
        )

    recv_reduce = functools.partialmethod(recv_copy, kind=StepKind.RECV_REDUCE)
    """target = target (op) the message of `peer`, packet by packet in order of arrival. Arguments as of `recv_copy`."""

    def send_nothing(self, peer: int) -> int:
        """Sends a message without bytes, for `recv_nothing` of `peer`: one packet, which says that there is no more."""
        message = self._sent[peer]
        self._sent[peer] += 1
        return self._add(StepKind.SEND, peer, 0, (), message=message, is_empty=True)

    def recv_nothing(self, peer: int) -> int:
        """Receives such a message; one with bytes fails the operation as a mismatch."""
        message = self._received[peer]
        self._received[peer] += 1
        return self._add(StepKind.RECV_COPY, peer, 0, (), target=Buffer.OUTPUT, message=message, is_empty=True)

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
        encoding: Encoding | None = None,
        kind: StepKind = StepKind.COPY,
    ) -> int:
        """target = source. STAGING is that of rank `staging_of`, by default this rank's own. `encoding`: what `encode`
        put into SCRATCH is decoded; `length` is that of the values."""
        if source == Buffer.STAGING:
            self._staging_bytes = max(self._staging_bytes, source_offset + length)
        if target == Buffer.STAGING:
            self._staging_bytes = max(self._staging_bytes, target_offset + length)
        return self._add(
            kind,
            self.rank if staging_of is None else staging_of,
            length,
            after,
            source=source,
            source_offset=source_offset,
            target=target,
            target_offset=target_offset,
            encoding=encoding and encoding._replace(keeps=False),
        )

    reduce = functools.partialmethod(copy, kind=StepKind.REDUCE)
    """target = target (op) source. Arguments as of `copy`."""

    def encode(
        self,
        encoding: Encoding,
        source: Buffer,
        offset: int,
        length: int,
        scratch: int,
        after: Sequence[int] = (),
        *,
        factor: int = 1,
    ) -> int:
        """Encodes `length` bytes of float32 into SCRATCH from `scratch` on.

        If the encoding keeps errors, the same range of INPUT holds them then, times `factor`.
        """
        return self._add(
            StepKind.ENCODE,
            self.rank,
            length,
            after,
            source=source,
            source_offset=offset,
            target=Buffer.SCRATCH,
            target_offset=scratch,
            encoding=encoding,
            factor=factor,
        )

    def scale(
        self, target: Buffer, offset: int, length: int, divisor: int, after: Sequence[int] = (), *, weight: int = 1
    ) -> int:
        """target = target / divisor. The executor also rescales for lost contributions here, so the divisor may be 1.

        `weight`: the number of ranks in each contribution that may be lost.
        """
        return self._add(StepKind.SCALE, divisor, length, after, target=target, target_offset=offset, message=weight)

    def post(self, after: Sequence[int] = ()) -> int:
        """Raises this rank's host counter by one; `posts` is then the value to await."""
        self.posts += 1
        return self._add(StepKind.POST, self.rank, 0, after, message=self.posts)

    def post_rest(self, after: Sequence[int] = ()) -> int:
        """Raises this rank's host counter to POSTS_LIMIT, which ends all awaits of it.

        It is the last post of a rank that cannot know the number of posts of the others.
        """
        self.posts = POSTS_LIMIT
        return self._add(StepKind.POST, self.rank, 0, after, message=self.posts)

    def await_(self, peer: int, value: int, after: Sequence[int] = ()) -> int:
        """Done once `peer`, on this host, has posted `value` times in this operation."""
        return self._add(StepKind.AWAIT, peer, 0, after, message=value)

    def tell(self, number: int, offset: int, after: Sequence[int] = ()) -> int:
        """Writes a number below 2^63 into this rank's STAGING, NUMBER_BYTES of it, for a `check` of another rank."""
        self._staging_bytes = max(self._staging_bytes, offset + NUMBER_BYTES)
        return self._add(StepKind.TELL, self.rank, 0, after, source_offset=number, target_offset=offset)

    def check(self, peer: int, number: int, offset: int, after: Sequence[int] = ()) -> int:
        """The operation fails as a mismatch unless `peer`, on this host, has told this number at `offset`."""
        self._staging_bytes = max(self._staging_bytes, offset + NUMBER_BYTES)
        return self._add(StepKind.CHECK, peer, 0, after, source_offset=offset, target_offset=number)

    def build(self) -> Plan:
        """The finished plan."""
        count = len(self._steps)
        steps = np.zeros(count, STEP)
        if count:
            # One conversion of plain integers, then whole columns: several times faster than an array of tuples.
            columns = np.array(self._steps, np.int64).T
            for name, column in zip(FIELDS, columns, strict=False):
                steps[name] = column
            steps["flags"] = self._flags
        for index, block, factor in self._encoded:
            steps["block"][index], steps["factor"][index] = block, factor
        lengths = np.fromiter(map(len, self._successors), np.int64, count)
        ends = np.cumsum(lengths)
        steps["successor_first"] = ends - lengths
        steps["successor_count"] = lengths
        edges = int(ends[-1]) if count else 0
        successors = np.fromiter((s for successor in self._successors for s in successor), np.uint32, edges)
        steps.flags.writeable = False
        successors.flags.writeable = False
        return Plan(
            steps,
            successors,
            self.rank,
            self.world_size,
            scratch_bytes=self._scratch_bytes,
            staging_bytes=self._staging_bytes,
            posts=self.posts,
            partial=any(flags & PARTIAL for flags in self._flags),
            encodes=bool(self._encoded),
            kept=tuple(
                (offset, length)
                for (kind, _, _, _, offset, _, length, _, _), flags in zip(self._steps, self._flags, strict=True)
                if kind == StepKind.ENCODE and flags & KEEP
            ),
        )

    def _add(
        self,
        kind: StepKind,
        peer: int,
        length: int,
        after: Sequence[int],
        *,
        source: int = 0,
        source_offset: int = 0,
        target: int = 0,
        target_offset: int = 0,
        message: int = 0,
        partial: bool = False,
        encoding: Encoding | None = None,
        factor: int = 0,
        is_empty: bool = False,
    ) -> int:
        if length <= 0 and kind not in INSTANTS and not is_empty:
            raise ValueError(f"rank {self.rank}: a {kind.name} step of {length} bytes; skip empty ranges")
        index = len(self._steps)
        if self._chain is not None:
            after = (*after, *self._chain.tail)
            self._chain.tail = (index,)
        for step in after:
            self._successors[step].append(index)
        self._successors.append([])
        self._flags.append((PARTIAL if partial else 0) | (encoding.flags if encoding else 0))
        if encoding:
            self._encoded.append((index, encoding.block, factor))
        self._steps.append((kind, peer, source, target, source_offset, target_offset, length, message, len(after)))
        return index
