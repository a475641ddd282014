"""`Coder`: codes versions of a state, and differences for readers that lag, in a thread of lower priority."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..transport.log import log
from . import content, swarm
from .content import Code, Whole
from .held import Held, Pool
from .layout import Layout

LEAST_NICE = 10
"""Niceness of the thread that codes: the trainer's threads go first."""

END_S = 4.0
"""Longest wait for the thread's end."""


class Step(NamedTuple):
    """The difference of a version to the one before it."""

    base: int
    version: int
    digest: str
    """The digest of the base."""
    code: Code | None
    """None: it would not be shorter than the state."""


class Coder:
    """Codes what is committed. It tells of its results in its own thread."""

    def __init__(
        self,
        layout: Layout,
        pool: Pool,
        offer: Callable[[Held, tuple[Step, ...]], None],
        grown: Callable[[], None],
        coded: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        """`offer`: takes a version and the differences to those before it, of which the last one may still grow.
        `grown`: called when it has. `coded`: called when it is complete, and the version before is of no more use.
        `failed`: called when the thread fails."""
        self._layout, self._pool = layout, pool
        self._offer, self._grown, self._coded, self._failed = offer, grown, coded, failed
        self._room = content.room()
        self._changed = threading.Condition()
        self._next: tuple[int, Tensor] | None = None
        self._merges: deque[tuple[int, str, Callable[[Held, Code | None], None]]] = deque()
        self._is_coding = self._is_closing = False
        self.error: BaseException | None = None
        """What ended the thread."""
        self._thread = threading.Thread(target=self._guarded, name="commlayer-code", daemon=True)
        self._thread.start()

    def commit(self, version: int, memory: Tensor) -> None:
        """Hands over a version, in memory of the pool. One that is not coded yet is skipped."""
        with self._changed:
            if self._next is not None:
                self._pool.give(self._next[1])
            self._next = version, memory
            self._changed.notify()

    def merge(self, version: int, digest: str, take: Callable[[Held, Code | None], None]) -> None:
        """Codes the difference from a version, over several steps, to the latest; `take` gets both, or None instead of
        the difference: it would not be shorter than the state."""
        with self._changed:
            self._merges.append((version, digest, take))
            self._changed.notify()

    def settle(self, timeout_s: float) -> bool:
        """Waits until the latest commit can be sent. False: it cannot yet, or never."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled or self.error is not None, timeout_s)
            return self._is_settled and self.error is None

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(END_S)

    @property
    def _is_settled(self) -> bool:
        return self._next is None and not self._is_coding

    def _guarded(self) -> None:
        try:
            self._code()
        except BaseException as error:
            log.warning("commlayer.publish: its thread ended: %s", error, exc_info=True)
            with self._changed:
                self.error = error
                self._changed.notify_all()
            self._failed()

    def _code(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux: a thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_NICE)
        held: Held | None = None
        steps: deque[Step] = deque()
        is_version = False
        while True:
            with self._changed:
                self._is_coding = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._next is not None or self._merges or self._is_closing)
                if self._is_closing:
                    return
                # The two take turns: or readers that lag starve while coding takes longer than a step.
                is_version = self._next is not None and not (is_version and self._merges)
                job, merge = None, None
                if is_version:
                    job, self._next = self._next, None
                else:
                    merge = self._merges.popleft()
                self._is_coding = is_version
            if job is not None:
                held = self._made(held, steps, *job)
            elif merge is not None and held is not None:
                merge[2](held, self._merged(held, steps, *merge[:2]))

    def _made(self, base: Held | None, steps: deque[Step], version: int, memory: Tensor) -> Held:
        """Makes a version of its state, and hands it to the thread that serves: with a long difference, before that is
        coded."""
        held = Held(version, content.digest(self._layout, memory), Whole(memory), self._layout)
        if base is None:
            self._offer(held, ())
            return held
        code = self._begun(base.memory, held)
        steps.append(Step(base.version, version, base.digest, code))
        while sum(self._layout.bytes if older.code is None else older.code.size for older in steps) > (
            self._layout.bytes
        ):
            steps.popleft()  # whoever holds a version before these gets the whole state
        self._offer(held, tuple(steps))
        self._fill(code, base.memory, held)
        self._coded()
        return held

    def _begun(self, base: Tensor, held: Held) -> Code | None:
        """The difference of a version to a base: a short one all of it, a long one before it is coded; None: it is not
        shorter than the state."""
        expected_bytes = content.estimate(self._layout, base, held.memory, self._room)
        if expected_bytes >= self._layout.bytes:
            return None
        code = Code(expected_bytes)
        if expected_bytes < swarm.SHARED_LEAST_BYTES:
            self._fill(code, base, held)
        return code if not code.is_ended or code.size < self._layout.bytes else None

    def _fill(self, code: Code | None, base: Tensor, held: Held) -> None:
        """Codes a difference, unless it is coded."""
        if code is None or code.is_ended:
            return
        for number, piece in enumerate(content.encode(self._layout, base, held.memory, held.digest, code.size)):
            code.add(number, piece)
            self._grown()
            if self._is_closing:
                return
        code.is_ended = True
        self._grown()

    def _merged(self, held: Held, steps: deque[Step], version: int, digest: str) -> Code | None:
        """The difference over several versions: the base is made of the state, by taking the steps back."""
        since = [step for step in steps if step.version > version]
        if not since or since[0].base != version or since[0].digest != digest:
            return None
        memory, code = self._pool.take(), None
        content.copy(memory, held.memory)
        if all(
            step.code is not None
            and all(
                content.apply(self._layout, memory, step.code.part(number), is_back=True)
                for number in range(step.code.parts)
            )
            for step in reversed(since)
        ):
            code = self._begun(memory, held)
            self._fill(code, memory, held)
        self._pool.give(memory)
        return code
