"""`Call`: one call of a collective, send or receive; `Calls`: those of one group, numbered.

Errors, the flight recorder and the profiler describe operations with it. A call keeps shapes, and no tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

from .base import Handle, Times

KEPT = 16
"""The latest calls that a group keeps."""

COLLECTIVES_KEPT = 1500
"""The latest collectives that a group keeps for the flight recorder, which writes the last 1,000 at least."""

MESSAGES_KEPT = 1000
"""The latest sends and receives that a group keeps for the flight recorder."""

ORDINALS_KEPT = 4096
"""The latest pairs of another rank and a tag whose messages a group numbers: some jobs have a tag for each step."""

FRAMES_SKIPPED = 7
"""Frames of this package between `_callers` and torch, at least."""

FRAMES_HELD = 5
"""The same of `hold_callers`."""

FRAMES_KEPT = 10

SHAPES_SHOWN = 3
"""Shapes of a list of tensors that the text of a call shows."""

ROOTED = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to", "send": "to", "receive": "from"}
"""Operations with a rank of their own, and the preposition before it."""

_held: ContextVar[tuple[Any, ...]] = ContextVar("commlayer.callers", default=())

Shapes = Sequence[Sequence[int]]


class Exchanged(NamedTuple):
    """The bytes that a call delivers, by rank of the group; None: none, whatever its arguments are."""

    sent: Sequence[int | None]
    received: Sequence[int | None]
    unit: str = "bytes"
    unit_bytes: int = 1
    """Bytes of that which the caller counts: a row, an element."""


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One call. Ranks are ranks of the group, times are seconds on the clock of `time.monotonic()`."""

    name: str
    """The name in `torch.distributed`: all_reduce, broadcast, send, receive."""
    dtype: Any = None
    """The torch.dtype of its tensors; None for a barrier."""
    inputs: Shapes = ()
    outputs: Shapes = ()
    reduction: str = ""
    """SUM, AVG and so on; empty where nothing is reduced."""
    rank: int | None = None
    """The root of a rooted collective, or the other rank of a message; None: none, or any source."""
    tag: int | None = None
    """The tag of a message; None: a collective."""
    signed: tuple[object, ...] = ()
    """Loss settings on which the ranks must agree: `OperationPolicy.signed`."""
    priority: int | None = None
    """Its class of service; None: not known yet."""
    label: str = ""
    """The part of the training whose data it moves: `bucket 3`; empty: not known."""

    sequence: int = 0
    """Its number in the group, from 1. Collectives have the same numbers on all ranks; messages count by themselves."""
    submitted_s: float = 0.0
    ended_s: float | None = None
    """The time of its end, if it ended before it returned."""
    handle: Handle | None = None
    """Its operation, if it returned before it ended."""
    is_failed: bool = False
    """Whether it raised an error before it returned."""
    is_waited: bool = False
    """Whether a thread has blocked in `Work.wait()`, as far as `telemetry.meter` looked."""
    exchanged: Exchanged | None = None
    """What it delivers, if the ranks' lengths may differ."""
    weights: tuple[int, ...] = ()
    """The weights of the hosts that own its shards; see `plans.plan.Plan`."""
    ordinal: int = 0
    """The number of a message among those with the same other rank, tag and direction, from 1."""
    frames: tuple[Any, ...] = ()
    """The code objects and instructions (int) of its callers in turns, innermost first."""

    @staticmethod
    def of(
        name: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        *,
        reduction: str = "",
        rank: int | None = None,
        signed: tuple[object, ...] = (),
        exchanged: Exchanged | None = None,
    ) -> Call:
        """The call of a collective with these tensors."""
        shapes = [tensor.shape for tensor in inputs]
        results = shapes if outputs is inputs else [tensor.shape for tensor in outputs]
        dtype = (inputs or outputs)[0].dtype
        return Call(name, dtype, shapes, results, reduction, rank, None, signed, exchanged=exchanged)

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.tag is not None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's inputs, or of its outputs if it has no inputs."""
        return sum(map(math.prod, self.inputs or self.outputs)) * (self.dtype.itemsize if self.dtype else 0)

    def times(self) -> Times | None:
        """The times at which it was submitted, moved its first byte, and ended. None while it runs."""
        if self.ended_s is not None:
            return Times(self.submitted_s, None, self.ended_s)
        return None if self.handle is None else self.handle.times()

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return not self.is_failed and self.times() is None

    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return self.is_failed or (self.handle is not None and self.handle.failed())

    def elapsed_s(self) -> float:
        """Seconds from the call to its end, or until now."""
        times = self.times()
        return (time.monotonic() if times is None else times.ended_s) - self.submitted_s

    def title(self) -> str:
        """Name and number: `all_reduce 41`."""
        return f"{self.name} {self.sequence}"

    def arguments(self, ranks: Sequence[int] = ()) -> str:
        """Its arguments: `of float32 [1000], SUM`. `ranks`: the numbers to show, by rank of the group."""
        parts = []
        shapes = self.inputs or self.outputs
        if shapes:
            shown = ", ".join(str(list(shape)) for shape in shapes[:SHAPES_SHOWN])
            more = f" and {len(shapes) - SHAPES_SHOWN} more" if len(shapes) > SHAPES_SHOWN else ""
            parts.append(f"of {str(self.dtype).removeprefix('torch.')} {shown}{more}")
        if self.name in ROOTED and (self.rank is not None or self.is_message):
            number = "any rank" if self.rank is None else f"rank {ranks[self.rank] if ranks else self.rank}"
            parts.append(f"{ROOTED[self.name]} {number}")
        text = " ".join(parts)
        details = [text] if text else []
        if self.reduction:
            details.append(self.reduction)
        if self.tag:
            details.append(f"tag {self.tag}")
        if self.signed:
            details.append(f"losses {self.signed}")
        if self.weights:
            details.append(f"shards {':'.join(map(str, self.weights))}")
        return ", ".join(details)


class Calls:
    """The calls of one group on this rank: numbers them, and keeps the latest."""

    def __init__(self, kept: int = KEPT) -> None:
        self._collectives = itertools.count(1)
        self._messages = itertools.count(1)
        self._ordinals: dict[tuple[str, int | None, int], int] = {}  # the latest come last
        self._lock = threading.Lock()
        self.latest: deque[Call] = deque(maxlen=kept)
        self.collectives: deque[Call] = deque(maxlen=COLLECTIVES_KEPT)
        self.messages: deque[Call] = deque(maxlen=MESSAGES_KEPT)
        self.collective_count = 0
        """Number of the latest collective."""
        self.tally: Callable[[Call], None] | None = None
        """Takes each call when it leaves `latest`."""

    def begin(self, call: Call) -> None:
        """Numbers and lists a call that is about to start, and notes the time: errors of other calls look for it from
        now on. `note_callers` follows."""
        call.submitted_s = time.monotonic()
        if call.tag is None:
            call.sequence = self.collective_count = next(self._collectives)
            self.collectives.append(call)
        else:
            call.sequence = next(self._messages)
            key = call.name, call.rank, call.tag
            with self._lock:
                call.ordinal = self._ordinals[key] = self._ordinals.pop(key, 0) + 1
                if len(self._ordinals) > ORDINALS_KEPT:
                    del self._ordinals[next(iter(self._ordinals))]
            self.messages.append(call)
        latest = self.latest
        if self.tally is not None and len(latest) == latest.maxlen:
            self.tally(latest[0])
        latest.append(call)

    def note_callers(self, call: Call) -> None:
        """Keeps the callers of a call. It takes a while: a call that does not block starts first."""
        call.frames = _held.get() or _callers(FRAMES_SKIPPED)

    def add(self, call: Call) -> None:
        """Lists a call that is about to start, and its callers."""
        self.begin(call)
        self.note_callers(call)


def hold_callers() -> None:
    """Calls that are added in this context, by whatever thread, have the callers of this one."""
    _held.set(_callers(FRAMES_HELD))


def _callers(skipped: int) -> tuple[Any, ...]:
    """The frames of this function's callers. Line numbers are found when the frames are written: that takes long."""
    try:
        frame: FrameType | None = sys._getframe(skipped)
    except ValueError:  # a test calls Calls.add itself
        return ()
    found: list[Any] = []
    left = FRAMES_KEPT
    while frame is not None and left > 0:
        found.append(frame.f_code)  # a list of pairs takes a quarter longer
        found.append(frame.f_lasti)
        frame = frame.f_back
        left -= 1
    return tuple(found)
