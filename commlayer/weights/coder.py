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
from . import content
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
    code: bytes | None
    """None: it would not be shorter than the state."""


class Coder:
    """Codes what is committed. It tells of its results in its own thread."""

    def __init__(
        self, layout: Layout, pool: Pool, offer: Callable[[Held, tuple[Step, ...]], None], failed: Callable[[], None]
    ) -> None:
        """`offer`: takes a version and the differences to those before it. `failed`: called when the thread fails."""
        self._layout, self._pool, self._offer, self._failed = layout, pool, offer, failed
        self._room: Tensor | None = None
        self._changed = threading.Condition()
        self._next: tuple[int, Tensor] | None = None
        self._merges: deque[tuple[int, str, Callable[[Held, bytes | None], None]]] = deque()
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

    def merge(self, version: int, digest: str, take: Callable[[Held, bytes | None], None]) -> None:
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
                held = self._coded(held, steps, *job)
            elif merge is not None and held is not None:
                merge[2](held, self._merged(held, steps, *merge[:2]))

    def _coded(self, base: Held | None, steps: deque[Step], version: int, memory: Tensor) -> Held:
        """Makes a version of its state, and hands it to the thread that serves."""
        held = Held(version, content.digest(self._layout, memory), memory, self._layout)
        if base is not None:
            code = content.encode(self._layout, base.memory, memory, self._room_for_code())
            steps.append(Step(base.version, version, base.digest, code))
            while sum(self._layout.bytes if older.code is None else len(older.code) for older in steps) > (
                self._layout.bytes
            ):
                steps.popleft()  # whoever holds a version before these gets the whole state
        self._offer(held, tuple(steps))
        return held

    def _room_for_code(self) -> Tensor:
        if self._room is None:
            self._room = content.room(self._layout)
        return self._room

    def _merged(self, held: Held, steps: deque[Step], version: int, digest: str) -> bytes | None:
        """The difference over several versions: the base is made of the state, by taking the steps back."""
        since = [step for step in steps if step.version > version]
        code = None
        if since and since[0].base == version and since[0].digest == digest:
            memory = self._pool.take()
            content.copy(memory, held.memory)
            codes = [step.code for step in reversed(since)]
            if all(
                difference is not None and content.apply(self._layout, memory, difference, is_back=True)
                for difference in codes
            ):
                code = content.encode(self._layout, memory, held.memory, self._room_for_code())
            self._pool.give(memory)
        return code
