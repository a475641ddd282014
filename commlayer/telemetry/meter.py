"""`Meter`: steps of the training and waits for communication, noted by the threads that train.

`meter` is the one of this process. It is off, and notes nothing, until an agent turns it on.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ..transport.call import Calls
from ..transport.step_counts import StepCounts

LATEST = 64
"""The latest calls of a group, among which those in flight are looked for."""

MARKS_KEPT = 4096
"""Steps that are kept until the agent has read them."""


class Hook(Protocol):
    """A communication hook's state: `frontend.HookState`."""

    steps: int
    uncounted_bytes: int
    policy: Any


class Mark(NamedTuple):
    """A step of the training begins its communication, or ends it."""

    source: int
    """Which hook or optimizer: a number of `StepCounts`."""
    is_hook: bool
    at_s: float
    """The time on the clock of `time.monotonic()`."""
    number: int
    """The number of the step."""
    overlaps: bool
    """Whether the next forward pass runs while the gradients travel."""
    waited_s: float = 0.0
    """What the threads of Python had waited by then: see `Meter.waiting`."""


class Meter:
    """Any thread may call."""

    def __init__(self) -> None:
        self.is_on = False
        self._lock = threading.Lock()
        self._hooks: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._waited_s = 0.0
        self._marks: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self._counts = StepCounts()

    def turn_on(self) -> None:
        """Begins."""
        self.is_on = True

    def turn_off(self) -> None:
        """Notes nothing any more."""
        self.is_on = False

    def hook_steps(self, hook: Hook, *, overlaps: bool = False) -> None:
        """A backward pass has its first bucket ready."""
        now_s = time.monotonic()
        with self._lock:
            self._hooks[hook] = now_s
            source, _ = self._counts.add(hook)
        self._mark(Mark(source, True, now_s, hook.steps, overlaps))

    def hooks(self) -> dict[Any, float]:
        """States of communication hooks (see `Hook`) that have made a step, and when each last began one, on the clock
        of `time.monotonic()`."""
        with self._lock:
            return dict(self._hooks)

    def optimizer_steps(self, optimizer: object) -> None:
        """An optimizer has made a step. Such steps count where no hook tells the steps."""
        with self._lock:
            source, count = self._counts.add(optimizer)
        self._mark(Mark(source, False, time.monotonic(), count, False))

    def waited(self, seconds: float) -> None:
        """The calling thread has waited for an operation."""
        with self._lock:
            self._waited_s += seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the calling thread waits for an operation."""
        if not self.is_on:
            yield
            return
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self.waited(time.monotonic() - begin_s)

    def read(self) -> tuple[float, list[Mark]]:
        """Seconds waited so far, and the marks since the last call."""
        with self._lock:
            marks = list(self._marks)
            self._marks.clear()
            return self._waited_s, marks

    def _mark(self, mark: Mark) -> None:
        with self._lock:
            self._marks.append(mark._replace(waited_s=self._waited_s))


meter = Meter()
"""The meter of this process."""


class Exposure:
    """Exposed communication: the time in which the training waits, and computes nothing.

    It is the sum of three parts. Calls that return when the operation has ended, and `Work.wait()`: the time within.
    Futures, for which DDP waits in C++: in each step the time from the last submission to the last end, as no gradient
    is left to compute then. Waits on the stream of a device are not seen.

    Figures of steps are of whole steps, wherever the times of two samples lie: a share of them cannot exceed the step.

    A part of it is waiting for the rank that came last, which no faster network shortens. The engine counts these
    waits over all operations, hidden ones included; those for which the training waited have the mean of them.
    """

    def __init__(self) -> None:
        self.exposed_s = 0.0
        """Seconds so far, in steps and between them; without the futures, whose waits are known in steps only."""
        self.late_s = 0.0
        """The part of it that was waiting for late ranks."""
        self.steps = 0
        """Steps so far."""
        self.stepped_s = 0.0
        """Duration of these steps."""
        self.exposed_in_steps_s = 0.0
        """Exposed in these steps."""
        self.late_in_steps_s = 0.0
        """The part of it that was waiting for late ranks."""
        self.step: int | None = None
        """The number of the latest step; None: none is known."""
        self.oldest_s = 0.0
        """Age of the oldest collective in flight."""
        self._waited_s = 0.0
        self._last: weakref.WeakKeyDictionary[Calls, int] = weakref.WeakKeyDictionary()
        self._counts: weakref.WeakKeyDictionary[Calls, int] = weakref.WeakKeyDictionary()
        self._marks: list[Mark] = []
        self._lagged_s: float | None = None
        self._waits_s = 0.0  # waits of the operations since steps were counted, for the rank that came last
        self._operations = 0  # these operations

    def update(self, meter: Meter, groups: Sequence[Calls], lagged_s: float = 0.0) -> None:
        """Reads the latest waits, calls and steps. `lagged_s`: what the engine's operations have waited so far for the
        rank that came last."""
        waited_s, marks = meter.read()
        before_s = self.exposed_s
        self.exposed_s += waited_s - self._waited_s
        self._waited_s = waited_s
        calls = [list(group.collectives) for group in groups]
        for group, latest in zip(groups, calls, strict=True):
            self._returned(group, latest)
        waits_s = max(
            0.0, lagged_s - (lagged_s if self._lagged_s is None else self._lagged_s)
        )  # new engines begin at 0
        self._lagged_s = lagged_s
        self.late_s += min(self.exposed_s - before_s, waits_s)
        self._waits_s += waits_s
        for group in groups:
            count = group.collective_count
            self._operations += count - self._counts.get(group, count)
            self._counts[group] = count
        running = (call.elapsed_s() for latest in calls for call in latest[-LATEST:] if call.is_running())
        self.oldest_s = max(running, default=0.0)
        marks = self._marks = _leading([*self._marks, *marks])
        if not marks:
            return
        self.step = marks[-1].number
        if len(marks) == 1:
            return
        self.steps += len(marks) - 1
        self.stepped_s += marks[-1].at_s - marks[0].at_s
        self._expose(marks, [call for latest in calls for call in _since(latest, marks[0].at_s)])
        del marks[:-1]

    def _expose(self, marks: Sequence[Mark], calls: Sequence[Any]) -> None:
        """Adds the exposed time of the steps between the marks."""
        within = [call for call in calls if call.submitted_s < marks[-1].at_s]
        returned_s = [call.ended_s - call.submitted_s for call in within if call.handle is None and call.ended_s]
        tails_s = tails(marks, calls)
        exposed_s = marks[-1].waited_s - marks[0].waited_s + sum(returned_s) + sum(tails_s)
        waited_for = len(returned_s) + sum(tail_s > 0 for tail_s in tails_s) + sum(call.is_waited for call in within)
        self.exposed_in_steps_s += exposed_s
        self.late_in_steps_s += min(exposed_s, waited_for * self._waits_s / max(self._operations, 1))
        self._waits_s, self._operations = 0.0, 0

    def _returned(self, group: Calls, latest: list[Any]) -> None:
        """Adds the calls that returned when their operation had ended."""
        last = self._last.setdefault(group, latest[-1].sequence if latest else 0)
        for call in latest:
            if call.sequence <= last:
                continue
            if call.handle is None and not call.is_failed:
                if call.ended_s is None:  # it runs, or has not got its handle yet
                    break
                self.exposed_s += call.ended_s - call.submitted_s
            last = call.sequence
        self._last[group] = last


def _leading(marks: list[Mark]) -> list[Mark]:
    """The marks of one source: of the hook with most of them, or else of the optimizer with most of them."""
    counts: dict[tuple[bool, int], int] = {}
    for mark in marks:
        counts[mark.is_hook, mark.source] = counts.get((mark.is_hook, mark.source), 0) + 1
    best = max(counts, key=lambda key: (key[0], counts[key]), default=None)
    return [mark for mark in marks if (mark.is_hook, mark.source) == best]


def _since(latest: list[Any], begin_s: float) -> Iterator[Any]:
    """The calls submitted since then."""
    for call in reversed(latest):
        if 0 < call.submitted_s < begin_s:  # 0: it is being submitted
            return
        yield call


def tails(marks: Sequence[Mark], calls: Iterable[Any]) -> list[float]:
    """Seconds from the last submission to the last end in each step between two marks, of the operations for which no
    thread of Python waited. 0 where the gradients travel during the next forward pass."""
    begins_s = [mark.at_s for mark in marks]
    submitted_s, ended_s = [0.0] * len(marks), [0.0] * len(marks)
    for call in calls:
        step = bisect.bisect_right(begins_s, call.submitted_s) - 1
        if 0 <= step < len(marks) - 1 and call.handle is not None and not call.is_waited:
            times = call.times()
            if times is not None:
                submitted_s[step] = max(submitted_s[step], call.submitted_s)
                ended_s[step] = max(ended_s[step], times.ended_s)
    return [
        0.0 if mark.overlaps else max(0.0, end - start)
        for mark, start, end in zip(marks[:-1], submitted_s, ended_s, strict=False)
    ]
