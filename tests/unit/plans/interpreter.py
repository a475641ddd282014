"""Runs the plans of all ranks together on numpy arrays, without sockets, threads or time.

It can lose what a plan allows to be lost: parts of partial messages then never arrive. Encoded ranges are made, sent
and decoded by blocks, with the codecs that it is given.

The order of events is random (and repeatable): any order that the dependencies allow may happen, and every transfer
happens in two parts at different times, as packets and parallel processes would have it. So a missing dependency or a
slot that is used again too early shows as a wrong result for some seed.
"""

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from commlayer.plans.codec import CODEC_SHIFT, CODECS, KEEP, Codec
from commlayer.plans.plan import FIELDS, INSTANTS, NUMBER_BYTES, PARTIAL, Buffer, Plan, StepKind
from commlayer.transport.base import Op
from tests.oracle import REDUCTIONS

Array = npt.NDArray[Any]

GARBAGE_BYTES = 4099
"""Period of the contents of fresh memory: a prime, unlike the lengths of messages."""

RECEIVES = (StepKind.RECV_COPY, StepKind.RECV_REDUCE)


class MismatchFoundError(Exception):
    """A rank has told another number than this one expects."""


class Place(NamedTuple):
    """Blocks in one operation: codecs that rotate blocks draw a rotation for each."""

    rank: int
    """The encoding rank."""
    block: int
    """Number of the first block."""


class Coder(Protocol):
    """A codec's kernels on numpy arrays."""

    def encode(self, values: Array, place: Place) -> Array:
        """float32 values, whole blocks but for the last, as bytes."""

    def decode(self, encoded: Array, count: int, place: Place) -> Array:
        """The first `count` values."""


def run(
    plans: Sequence[Plan],
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    op: Op,
    *,
    seed: int = 0,
    loss: float = 0.0,
    rescale: bool = False,
    coders: Mapping[str, Coder] | None = None,
) -> list[list[tuple[int, int]]]:
    """Executes plans[r] on inputs[r] and outputs[r], flat arrays of one dtype, until every step is done.

    `loss` is the probability that a part of a partial message is lost; with `rescale` SCALE steps make up for it.
    `coders`, by the name of their codec, run the steps of plans that encode.
    Returns, by rank, the (offset, length) in bytes of INPUT that were not counted, as `Handle.missing` does.

    Raises RuntimeError when no step can go on: a deadlock, or messages without a match.
    Raises MismatchFoundError when a CHECK fails.
    """
    interpreter = Interpreter(plans, inputs, outputs, op, seed, loss, rescale, coders or {})
    interpreter.run()
    return [sorted(missing) for missing in interpreter.missing]


class Event(NamedTuple):
    """Part of a step that may happen now."""

    rank: int
    step: int
    offset: int
    length: int
    payload: Array | None = None
    lost: bool = False


class Interpreter:
    """The state of all ranks: the rest of each step, the memory, and the messages on the wire."""

    def __init__(
        self,
        plans: Sequence[Plan],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: Op,
        seed: int,
        loss: float = 0.0,
        rescale: bool = False,
        coders: Mapping[str, Coder] = MappingProxyType({}),
    ) -> None:
        self.dtype, self.reduction, self.random = outputs[0].dtype, REDUCTIONS[op.name], random.Random(seed)
        self.loss, self.rescale = loss, rescale
        self.missing: list[list[tuple[int, int]]] = [[] for _ in plans]
        self.absent = [np.zeros(len(output), np.int64) for output in outputs]  # contributions, by element
        self.partial = [(plan.steps["flags"] & PARTIAL).astype(bool).tolist() for plan in plans]
        by_number: dict[int, tuple[Codec, Coder]] = {
            CODECS[name].number: (CODECS[name], coder) for name, coder in coders.items()
        }
        self.codecs = [[by_number.get(number) for number in plan.steps["flags"] >> CODEC_SHIFT] for plan in plans]
        self.keeps = [(plan.steps["flags"] & KEEP).astype(bool).tolist() for plan in plans]
        self.steps = [plan.steps[FIELDS].tolist() for plan in plans]
        self.successors = [plan.successors.tolist() for plan in plans]
        self.dependencies = [plan.steps["dependencies"].tolist() for plan in plans]
        self.left = [[max(step[6], 1) for step in steps] for steps in self.steps]  # bytes; steps without any have 1
        self.posted = [0] * len(plans)
        self.awaits: list[tuple[int, int]] = []
        self.events: list[Event] = []
        self.wire: dict[tuple[int, int, int], list[Event]] = {}  # by sender, receiver, message
        self.receivers: dict[tuple[int, int, int], int] = {}  # the receive step of a message, once it may begin
        garbage = np.random.default_rng(seed)
        self.memory: list[dict[int, Array]] = [
            {
                Buffer.INPUT: inputs[rank].view(np.uint8),
                Buffer.OUTPUT: outputs[rank].view(np.uint8),
                Buffer.SCRATCH: np.resize(garbage.integers(1, 99, GARBAGE_BYTES, np.uint8), plan.scratch_bytes),
                Buffer.STAGING: np.resize(garbage.integers(1, 99, GARBAGE_BYTES, np.uint8), plan.staging_bytes),
            }
            for rank, plan in enumerate(plans)
        ]

    def run(self) -> None:
        for rank, counts in enumerate(self.dependencies):
            for step, count in enumerate(counts):
                if count == 0:
                    self.begin(rank, step)
        while self.events:
            at = self.random.randrange(len(self.events))
            self.events[at], self.events[-1] = self.events[-1], self.events[at]
            self.happen(self.events.pop())
        stuck = [(rank, step) for rank, left in enumerate(self.left) for step, more in enumerate(left) if more]
        if stuck:
            raise RuntimeError(f"{len(stuck)} steps never ended; the first (rank, step) is {stuck[0]}")

    def begin(self, rank: int, step: int) -> None:
        """The step's dependencies are done: from now on its parts may happen."""
        kind, peer, _, _, _, _, length, message = self.steps[rank][step][:8]
        if kind == StepKind.AWAIT and self.posted[peer] < message:
            self.awaits.append((rank, step))
        elif kind in INSTANTS:
            self.events.append(Event(rank, step, 0, 1))
        elif kind in RECEIVES:
            name = (peer, rank, message)
            self.receivers[name] = step
            self.events += [part._replace(rank=rank, step=step) for part in self.wire.pop(name, [])]
        else:
            codec = self.codecs[rank][step]
            granule = codec[0].block_length if codec else self.dtype.itemsize
            elements = -(-length // granule)
            cut = self.random.randint(1, elements - 1) * granule if elements > 1 else length
            self.events.append(Event(rank, step, 0, cut))
            if cut < length:
                self.events.append(Event(rank, step, cut, length - cut))

    def happen(self, event: Event) -> None:
        rank, step, offset, length, payload, lost = event
        kind, peer, source, target, source_offset, target_offset, _, message = self.steps[rank][step][:8]
        if kind == StepKind.POST:
            self.posted[rank] = message
            woken = [awaited for awaited in self.awaits if self.awaited(*awaited)]
            self.awaits = [awaited for awaited in self.awaits if awaited not in woken]
            self.events += [Event(*awaited, 0, 1) for awaited in woken]
        elif kind == StepKind.TELL:
            self.number(rank, target_offset)[0] = source_offset
        elif kind == StepKind.CHECK:
            if self.number(peer, source_offset)[0] != target_offset:
                raise MismatchFoundError(f"rank {rank}: rank {peer} has told another number")
        elif kind == StepKind.SEND:
            data = self.read(rank, step, offset, length)
            lost = self.partial[rank][step] and self.random.random() < self.loss
            if lost and (source == Buffer.INPUT or self.codecs[rank][step]):
                at = target_offset if self.codecs[rank][step] else source_offset
                self.missing[rank].append((at + offset, length))
                if self.keeps[rank][step]:
                    kept = self.part(rank, peer, Buffer.INPUT, target_offset + offset, length)
                    kept += self.decode(rank, step, offset, data, len(kept))
            self.arrive((rank, peer, message), offset, length, data, lost)
        elif lost:
            if kind == StepKind.RECV_REDUCE and target == Buffer.OUTPUT:
                at = (target_offset + offset) // self.dtype.itemsize
                self.absent[rank][at : at + length // self.dtype.itemsize] += 1
        elif kind == StepKind.ENCODE:
            codec, coder = self.codec(rank, step)
            values = self.part(rank, peer, source, source_offset + offset, length)
            encoded = coder.encode(values, self.place(rank, step, offset))
            at = target_offset + codec.encoded_bytes(offset)
            self.memory[rank][Buffer.SCRATCH][at : at + len(encoded)] = encoded
            if self.keeps[rank][step]:
                error = values - self.decode(rank, step, offset, encoded, len(values))
                kept = self.part(rank, peer, Buffer.INPUT, source_offset + offset, length)
                kept[:] = error * self.steps[rank][step][12]
        elif kind != StepKind.AWAIT:
            into = self.part(rank, peer, target, target_offset + offset, length)
            if kind == StepKind.SCALE:
                if self.rescale:
                    at = (target_offset + offset) // self.dtype.itemsize
                    into *= len(self.steps) / (len(self.steps) - message * self.absent[rank][at : at + len(into)])
                into[:] = into / peer if self.dtype.kind == "f" else np.trunc(into / peer).astype(self.dtype)
            else:
                data = payload if payload is not None else self.read(rank, step, offset, length)
                if self.codecs[rank][step]:
                    data = self.decode(rank, step, offset, data, len(into))
                reduces = kind in (StepKind.REDUCE, StepKind.RECV_REDUCE)
                into[:] = self.reduction(into, data) if reduces else data
        self.end(rank, step, length)

    def number(self, rank: int, offset: int) -> Array:
        """A number in the staging of a rank."""
        return self.memory[rank][Buffer.STAGING][offset : offset + NUMBER_BYTES].view(np.int64)

    def codec(self, rank: int, step: int) -> tuple[Codec, Coder]:
        """The codec of an encoding step, and its coder."""
        found = self.codecs[rank][step]
        if found is None:
            raise ValueError(f"rank {rank}: step {step} needs a coder that run() was not given")
        return found

    def place(self, rank: int, step: int, offset: int) -> Place:
        """The blocks of a step from byte `offset` of its values on."""
        kind, peer = self.steps[rank][step][:2]
        first = self.steps[rank][step][11]
        return Place(peer if kind in RECEIVES else rank, first + offset // self.codec(rank, step)[0].block_length)

    def decode(self, rank: int, step: int, offset: int, encoded: Array, count: int) -> Array:
        """Values of a step from byte `offset` on, of which it has the bytes `encoded`."""
        return self.codec(rank, step)[1].decode(encoded, count, self.place(rank, step, offset))

    def read(self, rank: int, step: int, offset: int, length: int) -> Array:
        """What a step reads for `length` bytes from `offset` of its range: encoded if it has a codec."""
        _, peer, source, _, source_offset = self.steps[rank][step][:5]
        if not self.codecs[rank][step]:
            return self.part(rank, peer, source, source_offset + offset, length)
        codec, _ = self.codec(rank, step)
        at = source_offset + codec.encoded_bytes(offset)
        return self.memory[rank][source][at : at + codec.encoded_bytes(length)]

    def arrive(self, name: tuple[int, int, int], offset: int, length: int, data: Array, lost: bool) -> None:
        """Bytes reach the receiver, which keeps them until its receive step begins; or are lost."""
        part = Event(name[1], self.receivers.get(name, -1), offset, length, data.copy(), lost)
        (self.events if name in self.receivers else self.wire.setdefault(name, [])).append(part)

    def end(self, rank: int, step: int, length: int) -> None:
        self.left[rank][step] -= length or 1
        if self.left[rank][step] == 0:
            first, count = self.steps[rank][step][9:11]
            for successor in self.successors[rank][first : first + count]:
                self.dependencies[rank][successor] -= 1
                if self.dependencies[rank][successor] == 0:
                    self.begin(rank, successor)

    def awaited(self, rank: int, step: int) -> bool:
        _, peer, _, _, _, _, _, message = self.steps[rank][step][:8]
        return bool(self.posted[peer] >= message)

    def part(self, rank: int, peer: int, buffer: int, offset: int, length: int) -> Array:
        """A range of a buffer as elements; a range outside of the buffer is an error and not a short one."""
        memory = self.memory[peer if buffer == Buffer.STAGING else rank][buffer]
        if offset + length > memory.nbytes:
            raise IndexError(f"rank {rank}: bytes {offset}..{offset + length} of {memory.nbytes} in {Buffer(buffer)!r}")
        return memory[offset : offset + length].view(self.dtype)
