"""`Server`: codes versions of a state, and sends them to readers, in two threads of its own."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import CommError, ConfigError
from ..telemetry import curve
from ..transport.log import log
from . import content, message
from .answer import Departure
from .held import Held, Pool
from .layout import Layout
from .message import DIFFERENCE, END, WHOLE, Head

ROOM_MOST = 1024
"""Connections: readers, and strangers whose handshake has not failed yet."""

ROOM_SHARE = 4
"""They get at most one of so many descriptors: the others are the trainer's."""

LEAST_NICE = 10
"""Niceness of the thread that codes: the trainer's threads go first."""

LOOK_S = 0.1
"""Time between two looks whether a publisher that ends can end."""

PUSH_LEAST_S, PUSH_MOST_S = 0.005, 0.05
"""Time between two looks whether there is room for more parts of answers: it grows while there is none."""

FAREWELL_S = 2.0
"""Longest time for the last messages of a publisher that ends."""


class Step(NamedTuple):
    """The difference of a version to the one before it."""

    base: int
    version: int
    digest: str
    """The digest of the base."""
    code: bytes | None
    """None: it would not be shorter than the state."""


class Question(NamedTuple):
    """A reader that waits for an answer."""

    reader: bytes
    head: Head


class Server:
    """Serves versions of one state at an address. `life`: see `Head`."""

    def __init__(self, layout: Layout, pool: Pool, key: bytes, endpoint: str, life: str) -> None:
        """Raises ConfigError if the port is taken."""
        zmq = curve.load()
        self._layout, self._pool, self._life = layout, pool, life
        self._room: Tensor | None = None
        self._changed = threading.Condition()
        self._next: tuple[int, Tensor] | None = None
        self._is_coding = False
        self._done: deque[Callable[[], None]] = deque()
        self._merges: deque[Question] = deque()
        self._latest: Held | None = None
        self._steps: deque[Step] = deque()
        self._waiting: dict[bytes, Question] = {}
        self._departures: dict[bytes, Departure] = {}
        self._readers: dict[bytes, int] = {}
        """The connections, by their descriptors, of those that were not told of the end."""
        self._end_s: float | None = None
        """The time until which readers are told of the end; None: there is no end yet."""
        self._is_closing = False
        self.error: BaseException | None = None
        """What ended a thread."""
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._context = zmq.Context()
        self._gate = curve.Gate(self._context, key)
        router = message.tuned(curve.server(self._context, key, message.ASK_MAX_BYTES))
        router.linger = int(FAREWELL_S * 1e3)
        router.router_mandatory = True  # or libzmq drops what has no room
        router.sndhwm = message.WINDOW
        try:
            self._door = curve.Door(router, endpoint, _room())
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{endpoint}: {error.strerror}; use a free port, and an address of this host") from error
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=f"commlayer-{name}", daemon=True)
            for run, name in ((self._code, "code"), (self._serve, "serve"))
        ]
        for thread in self._threads:
            thread.start()

    def commit(self, version: int, memory: Tensor) -> None:
        """Hands over a version, in memory of the pool. One that is not coded yet is skipped."""
        with self._changed:
            if self._next is not None:
                self._pool.give(self._next[1])
            self._next = version, memory
            self._changed.notify()

    def settle(self, timeout_s: float) -> bool:
        """Waits until the latest commit can be sent. False: it cannot yet, or never."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._next is None and not self._is_coding) or self.error is not None, timeout_s
            )
            return self._next is None and not self._is_coding and self.error is None

    def close(self, wait_s: float) -> None:
        """Tells each reader that no version follows, once it holds the latest, but all of them after `wait_s`; ends the
        threads."""
        self._end_s = time.monotonic() + wait_s
        self._tell()
        self._threads[1].join(wait_s + 2 * FAREWELL_S)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._threads[0].join(2 * FAREWELL_S)
        self._wake.close()
        self._woken.close()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            log.warning("commlayer.publish: its thread ended: %s", error, exc_info=True)
            with self._changed:
                self.error = error
                self._is_closing = True
                self._changed.notify_all()
            self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"x")

    # ---- the thread that codes ----

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
                self._merge(held, steps, merge)

    def _coded(self, base: Held | None, steps: deque[Step], version: int, memory: Tensor) -> Held:
        """Makes a version of its state, and hands it to the thread that serves."""
        held = Held(version, content.digest(self._layout, memory), memory, self._layout)
        step = None
        if base is not None:
            code = content.encode(self._layout, base.memory, memory, self._room_for_code())
            step = Step(base.version, version, base.digest, code)
            steps.append(step)
            while sum(self._layout.bytes if older.code is None else len(older.code) for older in steps) > (
                self._layout.bytes
            ):
                steps.popleft()  # whoever holds a version before these gets the whole state
        kept = tuple(steps)
        self._done.append(lambda: self._offer(held, kept))
        self._tell()
        return held

    def _room_for_code(self) -> Tensor:
        if self._room is None:
            self._room = content.room(self._layout)
        return self._room

    def _merge(self, held: Held, steps: deque[Step], question: Question) -> None:
        """The difference over several versions: the base is made of the state, by taking the steps back."""
        since = [step for step in steps if step.version > question.head.version]
        code = None
        if since and since[0].base == question.head.version and since[0].digest == question.head.digest:
            memory = self._pool.take()
            content.copy(memory, held.memory)
            codes = [step.code for step in reversed(since)]
            if all(
                difference is not None and content.apply(self._layout, memory, difference, is_back=True)
                for difference in codes
            ):
                code = content.encode(self._layout, memory, held.memory, self._room_for_code())
            self._pool.give(memory)
        self._done.append(lambda: self._send(question, held, code))
        self._tell()

    # ---- the thread that serves ----

    def _serve(self) -> None:
        zmq = curve.load()
        router, poller = self._door.router, zmq.Poller()
        for watched in (router, self._door.news, self._gate.socket, self._woken):
            poller.register(watched, zmq.POLLIN)
        push_s = PUSH_LEAST_S
        try:
            while not self._is_closing and not self._is_over():
                limits_s = [push_s] * bool(self._departures) + [LOOK_S] * (self._end_s is not None)
                ready = dict(poller.poll(1e3 * min(limits_s) if limits_s else None))
                self._look()
                if self._gate.socket in ready:
                    self._gate.answer()
                if self._woken.fileno() in ready:
                    self._woken.recv(4096)
                while self._done:
                    self._done.popleft()()
                if router in ready:
                    self._hear(router.recv_multipart(copy=False))
                if self._end_s is not None:
                    for reader in list(self._waiting):
                        self._answer(reader)
                push_s = PUSH_LEAST_S if self._push() else min(2 * push_s, PUSH_MOST_S)
            if self.error is None:
                self._farewell()
        finally:
            self._door.close()
            self._gate.socket.close()
            self._context.destroy(linger=0)  # the end that the closed router still sends has its own limit

    def _look(self) -> None:
        """Forgets readers whose connections have ended."""
        ended = set(self._door.look())
        for reader in [identity for identity, descriptor in self._readers.items() if descriptor in ended]:
            self._forget(reader)

    def _forget(self, reader: bytes) -> None:
        self._readers.pop(reader, None)
        self._waiting.pop(reader, None)
        self._end_departure(reader)

    def _end_departure(self, reader: bytes) -> None:
        departure = self._departures.pop(reader, None)
        if departure is not None and departure.held is not None:
            self._give_back(departure.held)

    def _give_back(self, held: Held) -> None:
        """Its memory, unless it is the latest version, or on its way to a reader."""
        if held is not self._latest and all(departure.held is not held for departure in self._departures.values()):
            self._pool.give(held.memory)

    def _say(self, reader: bytes, frames: list[Any]) -> bool:
        """Whether there was room for the message."""
        zmq = curve.load()
        try:
            self._door.router.send_multipart([reader, *frames], flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(reader)
            return False
        return True

    def _push(self) -> bool:
        """Sends parts of answers for which there is room. Whether any."""
        is_any = False
        for reader, departure in list(self._departures.items()):
            for _ in range(message.WINDOW):  # then the others
                if departure.message is None or not self._say(reader, departure.message):
                    break
                departure.advance()
                is_any = True
            if departure.message is None:
                self._end_departure(reader)
        return is_any

    def _farewell(self) -> None:
        """Tells the readers that no version follows."""
        until_s = time.monotonic() + FAREWELL_S
        while self._readers and time.monotonic() < until_s:
            for reader in list(self._readers):
                self._tell_end(reader)
            if self._readers:
                time.sleep(PUSH_LEAST_S)
                self._look()

    def _tell_end(self, reader: bytes) -> None:
        if self._say(reader, [END, Head(0).text(), b""]):
            self._forget(reader)

    def _is_over(self) -> bool:
        """Whether the end has come: all readers know it, or have gone, or it is time."""
        if self._end_s is None:
            return False
        return not self._readers or not self._door.count or time.monotonic() >= self._end_s

    def _hear(self, frames: list[Any]) -> None:
        """A question. One of another release, or a broken one, gets no answer: its reader says so after a while."""
        descriptor = int(frames[-1].get("__fd"))
        self._look()  # after the message came: before it, libzmq told of the descriptor's former connection
        if not self._door.has(descriptor):
            return
        try:
            reader, kind, text = [frame.bytes for frame in frames]
            head = Head.read(text)
        except ValueError as error:
            log.warning("commlayer.publish: a message that is no question: %s", error)
            return
        if kind == message.ASK:
            self._end_departure(reader)
            self._readers[reader] = descriptor
            self._waiting[reader] = Question(reader, head)
            self._answer(reader)

    def _offer(self, held: Held, steps: tuple[Step, ...]) -> None:
        """A new version: those that wait get it."""
        before, self._latest, self._steps = self._latest, held, deque(steps)
        if before is not None:
            self._give_back(before)
        for reader in list(self._waiting):
            self._answer(reader)

    def _answer(self, reader: bytes) -> None:
        """Answers a reader that waits, if there is a version that it does not hold."""
        latest = self._latest
        question = self._waiting[reader]
        head = question.head
        is_known = head.life == self._life and head.layout == self._layout.fingerprint
        if latest is None or (is_known and (head.version, head.digest) == (latest.version, latest.digest)):
            if self._end_s is not None:
                self._tell_end(reader)
            return
        del self._waiting[reader]
        last = self._steps[-1] if self._steps else None
        if is_known and last is not None and (last.base, last.digest) == (head.version, head.digest):
            self._send(question, latest, last.code)
        elif is_known and any((step.base, step.digest) == (head.version, head.digest) for step in self._steps):
            with self._changed:
                self._merges.append(question)
                self._changed.notify()
        else:
            self._send(question, latest, None)

    def _send(self, question: Question, held: Held, code: bytes | None) -> None:
        """Begins to send a version: the difference `code` to what the reader holds, or, without one, the whole
        state, of the latest version: it may be later by now."""
        asked, reader = question.head, question.reader
        if reader not in self._readers:
            return
        whole = (self._latest or held) if code is None else None
        held = whole or held
        layout = b"" if asked.layout == self._layout.fingerprint else self._layout.text
        block = code if whole is None else whole.memory.numpy().data
        head = Head(
            asked.request,
            self._life,
            held.version,
            held.digest,
            self._layout.fingerprint,
            base=-1 if code is None else asked.version,
            layout_bytes=len(layout),
            code_bytes=len(block or b""),
        )
        kind = DIFFERENCE if whole is None else WHOLE
        self._end_departure(reader)
        self._departures[reader] = Departure(kind, head, layout, block, whole)


def _room() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ROOM_MOST if soft == resource.RLIM_INFINITY else max(1, min(ROOM_MOST, soft // ROOM_SHARE))


def raised(error: BaseException | None) -> None:
    """Raises the error of a thread in the caller's."""
    if error is not None:
        raise CommError(f"the threads of commlayer.publish ended: {error}; see the log, and publish again") from error
