"""`Server`: sends versions of a state to readers, in a thread of its own. Another one codes them (`coder.py`)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import CommError
from ..telemetry import curve
from ..transport.log import log
from . import message, swarm
from .answer import Departure
from .beside import Beside
from .coder import Coder, Step
from .content import TAG_BYTES, Code
from .deal import Deal
from .held import Held, Pool
from .layout import Layout
from .message import DIFFERENCE, END, HEARD, WHOLE, Head, OtherReleaseError, Plan, Want
from .outlet import Outlet
from .parts import PUBLISHER
from .peers import BATCH
from .swarm import Reader

LOOK_S = 0.1
"""Time between two looks whether a publisher that ends can end, and whether the parts of a deal move."""

PUSH_LEAST_S, PUSH_MOST_S = 0.005, 0.05
"""Time between two looks whether there is room for more parts of answers: it grows while there is none."""

FAREWELL_S = 2.0
"""Longest time for the last messages of a publisher that ends."""

GATHER_S = 0.1
"""Longest wait for other readers that ask for the same long content: those that come later get it from readers."""


class Question(NamedTuple):
    """A reader that waits for an answer."""

    reader: bytes
    head: Head


class Gathering(NamedTuple):
    """Readers that ask for the same content."""

    until_s: float
    held: Held
    """The version to which a difference leads; a whole state is that of the latest."""
    code: Code | None
    questions: dict[bytes, Question]


class Server:
    """Serves versions of one state at an address. `life`: see `Head`."""

    def __init__(self, layout: Layout, pool: Pool, key: bytes, endpoint: str, life: str) -> None:
        """Raises ConfigError if the port is taken."""
        self._layout, self._pool, self._life = layout, pool, life
        self._done: deque[Callable[[], None]] = deque()
        self._latest: Held | None = None
        self._steps: tuple[Step, ...] = ()
        self._waiting: dict[bytes, Question] = {}
        self._gatherings: dict[str, Gathering] = {}
        self._departures: dict[bytes, Departure] = {}
        self._readers: dict[bytes, Reader] = {}
        """Those that were not told of the end."""
        self._dealt = 0
        """Deals so far."""
        self._base: Held | None = None
        """The version before the latest, while the difference between them is coded."""
        self._beside = Beside()
        self._end_s: float | None = None
        """The time until which readers are told of the end; None: there is no end yet."""
        self._is_closing = False
        self._error: BaseException | None = None
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._context = curve.load().Context()
        try:
            self.outlet = Outlet(self._context, key, endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._coder = Coder(
            layout,
            pool,
            lambda held, steps: self._do(lambda: self._offer(held, steps)),
            self._tell,
            lambda: self._do(self._release),
            lambda: self._do(self._abandon),
        )
        self._thread = threading.Thread(target=self._guarded, name="commlayer-serve", daemon=True)
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """What ended a thread."""
        return self._error or self._coder.error

    def commit(self, version: int, memory: Tensor) -> None:
        """Hands over a version, in memory of the pool. One that is not coded yet is skipped."""
        self._coder.commit(version, memory)

    def settle(self, timeout_s: float) -> bool:
        """Waits until the latest commit can be sent. False: it cannot yet, or never."""
        return self._coder.settle(timeout_s) and self._error is None

    def close(self, wait_s: float) -> None:
        """Tells each reader that no version follows, once it holds the latest, but all of them after `wait_s`; ends the
        threads."""
        end_s = time.monotonic() + wait_s
        self._do(lambda: self._end_at(end_s))  # after the latest version, which is handed over in the same way
        self._thread.join(wait_s + 3 * FAREWELL_S)  # a farewell, and what it has said, take two of them
        self._coder.close()
        self._wake.close()
        self._woken.close()

    def _guarded(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            log.warning("commlayer.publish: its thread ended: %s", error, exc_info=True)
            self._error = error

    def _end_at(self, end_s: float) -> None:
        self._end_s = end_s

    def _abandon(self) -> None:
        self._is_closing = True

    def _do(self, call: Callable[[], None]) -> None:
        """Has it called in the thread that serves."""
        self._done.append(call)
        self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"x")

    # ---- the thread that serves ----

    def _serve(self) -> None:
        zmq = curve.load()
        poller = zmq.Poller()
        for watched in (*self.outlet.sockets, self._woken):
            poller.register(watched, zmq.POLLIN)
        push_s = PUSH_LEAST_S
        try:
            while not self._is_closing and not self._is_over():
                is_leaving = any(departure.message is not None for departure in self._departures.values())
                is_dealing = any(
                    departure.deal and not departure.deal.is_ended for departure in self._departures.values()
                )
                limits_s = [push_s] * is_leaving + [LOOK_S] * (is_dealing or self._end_s is not None)
                now_s = time.monotonic()
                limits_s += [max(gathering.until_s - now_s, 0.0) for gathering in self._gatherings.values()]
                ready = dict(poller.poll(1e3 * min(limits_s) if limits_s else None))
                self._look(ready)
                if self._woken.fileno() in ready:
                    self._woken.recv(4096)
                while self._done:
                    self._done.popleft()()
                if self.outlet.sockets[0] in ready:
                    for _ in range(BATCH):
                        if not self._hear():
                            break
                if self._end_s is not None:
                    for reader in list(self._waiting):
                        self._answer(reader)
                self._part()
                self._yield()
                push_s = PUSH_LEAST_S if self._push() or self._beside.is_sending else min(2 * push_s, PUSH_MOST_S)
            if self.error is None:
                self._farewell()
        finally:
            self.outlet.close(FAREWELL_S)
            self._context.destroy(linger=0)  # the end that the closed router still sends has its own limit

    def _look(self, ready: dict[Any, int]) -> None:
        """Forgets readers whose connections have ended."""
        ended = self.outlet.look(ready)
        for reader in [identity for identity, known in self._readers.items() if known.descriptor in ended]:
            self._forget(reader)

    def _forget(self, reader: bytes) -> None:
        self._readers.pop(reader, None)
        self._waiting.pop(reader, None)
        self._end_departure(reader)

    def _end_departure(self, reader: bytes) -> None:
        for gathering in self._gatherings.values():
            gathering.questions.pop(reader, None)
        departure = self._departures.pop(reader, None)
        if departure is None:
            return
        if departure.deal is not None:
            departure.deal.leave(departure.plan.own)
        if departure.held is not None:
            self._give_back(departure.held)

    def _give_back(self, held: Held) -> None:
        """Its memory, unless it is the latest version, or the one before in use, or on its way to a reader."""
        used = (self._latest, self._base, *(departure.held for departure in self._departures.values()))
        if held not in used:
            self._pool.give(held.memory)

    def _yield(self) -> None:
        """Looks whether the training in this process uses the link, and whether parts that were dealt move."""
        now_s = time.monotonic()
        if self._departures:
            self._beside.look(now_s)
        for departure in self._departures.values():
            if departure.deal is not None:
                departure.deal.is_beside = self._beside.is_there
                departure.deal.look(now_s)

    def _push(self) -> bool:
        """Sends parts of answers for which there is room, but little while training sends. Whether any."""
        if not self._beside.may_publish:
            return False
        before = self.outlet.sent_bytes
        is_any, ended = self.outlet.push(self._departures)
        self._beside.publish(self.outlet.sent_bytes - before)
        for reader in ended:
            self._forget(reader)
        for reader, departure in list(self._departures.items()):
            if departure.message is None and not departure.lasts:
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
                self._look({})

    def _tell_end(self, reader: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            if not self.outlet.say(reader, [END, Head(0).text(), b""]):
                return
        self._forget(reader)

    def _is_over(self) -> bool:
        """Whether the end has come: all readers know it, or have gone, or it is time."""
        if self._end_s is None:
            return False
        return not self._readers or not self.outlet.count or time.monotonic() >= self._end_s

    def _hear(self) -> bool:
        """Hears a message of a reader, if there is one. A broken one gets no answer, and a line in the log; one of
        another release learns that it is."""
        try:
            heard = self.outlet.hear()
            self._look({})  # after the message came: before it, libzmq told of the descriptor's former connection
            if heard is None:
                return False
            reader, descriptor, kind, text = heard
            if self.outlet.has(descriptor):
                self._take(reader, descriptor, kind, text)
        except OtherReleaseError as error:
            log.warning("commlayer.publish: a reader has another release: %s", error)
        except ValueError as error:
            log.warning("commlayer.publish: a message that is no question: %s", error)
        return True

    def _take(self, reader: bytes, descriptor: int, kind: bytes, text: bytes) -> None:
        """Takes a message of a reader. Raises ValueError for one that is none."""
        if kind == message.ASK:
            with contextlib.suppress(ConnectionError):
                self.outlet.say(reader, [HEARD, Head(0).text(), b""])
        departure = self._departures.get(reader)
        if kind in (message.LACK, message.TOOK):
            want = Want.read(text)
            if departure is None or want.request != departure.head.request or want.seats != len(departure.plan.sources):
                return
            if kind == message.LACK:
                self._help(reader, departure, want)
            elif departure.deal is not None:
                departure.deal.passed(departure.plan.own, want.at)
            return
        head = Head.read(text)
        address = swarm.address_of(head.address) if head.address else ""
        if kind == message.HOLD:
            if reader in self._readers:
                self._readers[reader].holds(head.digest)
        elif kind == message.DONE:
            if departure is not None and departure.head.request == head.request:
                self._end_departure(reader)
        elif kind == message.ASK:
            self._end_departure(reader)
            known = self._readers.setdefault(reader, Reader(descriptor))
            known.descriptor, known.address = descriptor, address
            known.holds(head.digest)
            self._waiting[reader] = Question(reader, head)
            self._answer(reader)

    def _help(self, reader: bytes, departure: Departure, want: Want) -> None:
        """Sends what a reader lacks, because the source of a seat has failed it."""
        departure.give(want.seat, want.at)
        source = departure.plan.sources[want.seat]
        if not want.why or source == PUBLISHER:
            return
        departure.blamed.add(want.seat)
        if departure.deal is not None:
            departure.deal.distrust(want.seat)
        log.warning(
            "commlayer.publish: the reader at %s gave no part %d of seat %d of %s to %s: %s",
            source,
            want.at,
            want.seat,
            want.name,
            self._readers[reader].address,
            want.why,
        )
        blamed = {departure.plan.sources[seat] for seat in departure.blamed}
        others = set(departure.plan.sources) - {PUBLISHER}
        until_s = time.monotonic() + swarm.LEFT_OUT_S
        is_odd = len(others) > 1 and 2 * len(blamed) > len(others)  # most of the others would fail it, not one
        if is_odd:
            self._readers[reader].shares_from_s = until_s
        for known in self._readers.values():
            if known.address in blamed:
                known.serves_from_s = 0.0 if is_odd else until_s

    def _offer(self, held: Held, steps: tuple[Step, ...]) -> None:
        """A new version: those that wait get it."""
        self._base, self._latest, self._steps = self._latest, held, steps
        for reader in list(self._waiting):
            self._answer(reader)

    def _release(self) -> None:
        """The latest version is coded."""
        base, self._base = self._base, None
        if base is not None:
            self._give_back(base)

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
            self._gather(question, latest, last.code)
        elif is_known and any((step.base, step.digest) == (head.version, head.digest) for step in self._steps):
            self._coder.merge(
                head.version,
                head.digest,
                lambda held, code: self._do(lambda: self._gather(question, held, code)),
            )
        else:
            self._gather(question, latest, None)

    def _gather(self, question: Question, held: Held, code: Code | None) -> None:
        """Sends a version: the difference `code` to what the reader holds, or, without one, the whole state, of the
        latest version: it may be later by now. A long content waits for others that ask for it."""
        reader = self._readers.get(question.reader)
        if reader is None:
            return
        now_s = time.monotonic()
        size = self._layout.bytes if code is None else code.size
        if size < swarm.SHARED_LEAST_BYTES or not reader.shares(now_s):
            self._begin(question, self._current(held, code), code, "", [PUBLISHER], {})
            return
        name = "whole" if code is None else f"{self._life} {question.head.version} {held.version}"
        first = Gathering(now_s + GATHER_S, held, code, {})
        self._gatherings.setdefault(name, first).questions[question.reader] = question

    def _part(self) -> None:
        """Begins the answers to those who have gathered."""
        now_s = time.monotonic()
        able = {reader for reader, known in self._readers.items() if known.shares(now_s)}
        for name, gathering in list(self._gatherings.items()):
            if now_s < gathering.until_s and able > set(gathering.questions):
                continue
            del self._gatherings[name]
            held = self._current(gathering.held, gathering.code)
            shared = held.digest if gathering.code is None else name
            questions = [question for question in gathering.questions.values() if question.reader in self._readers]
            asking = [self._readers[question.reader] for question in questions]
            holders = [reader for reader in self._readers.values() if reader.gives(shared)]
            deals: dict[tuple[str, ...], tuple[int, Deal]] = {}
            for question, sources in zip(questions, swarm.deal(asking, holders, now_s), strict=True):
                self._begin(question, held, gathering.code, shared, sources, deals)

    def _current(self, held: Held, code: Code | None) -> Held:
        """The version to send: that to which a difference leads, or else the latest."""
        return held if code is not None or self._latest is None else self._latest

    def _begin(
        self,
        question: Question,
        held: Held,
        code: Code | None,
        name: str,
        sources: list[str],
        deals: dict[tuple[str, ...], tuple[int, Deal]],
    ) -> None:
        """Begins to send a version. `deals`: of groups of readers, by their addresses."""
        asked, reader = question.head, question.reader
        layout = b"" if asked.layout == self._layout.fingerprint else self._layout.text
        source = held.whole if code is None else code
        deal, number = None, 0
        if PUBLISHER in sources and len(sources) > 1:
            group = tuple(giver or self._readers[reader].address for giver in sources)
            if group not in deals:
                self._dealt += 1
                deals[group] = self._dealt, Deal(source, len(group), time.monotonic())
            number, deal = deals[group]
        plan = Plan(name, sources, number)
        head = Head(
            asked.request,
            self._life,
            held.version,
            held.digest,
            self._layout.fingerprint,
            base=-1 if code is None else asked.version,
            layout_bytes=len(layout),
            tags_bytes=TAG_BYTES * held.whole.parts if plan.is_shared and code is None else 0,
        )
        kind, sent = (WHOLE, held) if code is None else (DIFFERENCE, None)
        self._end_departure(reader)
        self._readers[reader].sent = name
        self._departures[reader] = Departure(kind, head, plan, layout, source, sent, deal)


def raised(error: BaseException | None) -> None:
    """Raises the error of a thread in the caller's."""
    if error is not None:
        raise CommError(f"the threads of commlayer.publish ended: {error}; see the log, and publish again") from error
