"""`Intake`: the thread of a reader. It asks the publisher, receives the answers from it and from other readers, and
serves these: also while the user's thread does other work."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..errors import CommError, MismatchError, PeerLostError
from ..telemetry import curve
from ..transport.log import log
from . import swarm
from .answer import Arrival, Place
from .held import Held, Pool
from .line import Line, Link
from .message import (
    ASK,
    DONE,
    END,
    GONE,
    HEARD,
    HOLD,
    LACK,
    LAST,
    PART,
    PROTOCOL,
    RELEASE,
    TEXT,
    TOOK,
    Head,
    OtherReleaseError,
    Plan,
    Want,
)
from .parts import PUBLISHER
from .peers import Peers
from .service import Service
from .shelf import Shelf

LOOK_S = 0.05
"""Time between two looks whether a source is late."""

PUSH_S = 0.005
"""Time between two looks whether there is room for more parts for other readers."""

BREAKS = 3
"""So many connections that end within a version, and none that brings one: an error says so."""

AGAIN_S = 0.01
"""Time between two tries to ask, when a connection has just begun."""

HEARD_S = 8.0
"""Longest time until the publisher says that it has heard a question. Those of releases before HEARD never do. It is
above SILENT_MS, after which a connection to a process without life has ended."""

END_S = 5.0
"""Longest wait for the thread's end."""


class Question(NamedTuple):
    """What a reader asks: another version than it holds."""

    head: Head
    """Without the number, and the address."""
    held: Held | None
    life: str
    """The publisher's life of which the held version is."""
    pool: Pool | None


class Intake:
    """Receives answers for a `Subscription`."""

    def __init__(self, address: str, key: bytes, endpoint: str, *, serves: bool) -> None:
        """`serves`: whether it serves other readers, and they it."""
        zmq = curve.load()
        self._address, self._endpoint = address, endpoint
        self._is_local = swarm.is_loopback(endpoint.removeprefix("tcp://"))
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._line = Line(self._context, key, endpoint, self._poller)
        self._peers = Peers(self._context, key, self._poller)
        self._shelf = Shelf()
        self._service = Service(self._context, key, self._shelf, is_wanted=serves)
        self._question: Question | None = None
        self._is_asked = False
        """Whether the question has left on this connection."""
        self._unheard_s: float | None = None
        """When it left (`_awake_s`), until the publisher says that it has heard it."""
        self._asked = 0
        self._breaks = 0
        """Connections that ended within a version, since the last complete one."""
        self._arrival: Arrival | None = None
        self._is_shelved = False
        self._took = 0
        """How many parts of its own seat the publisher knows to have passed through this reader."""
        self._awake_s = 0.0
        """Time in which this thread ran: a reader that was stopped itself finds nobody late."""
        self._last: Arrival | None = None
        """The last complete one, whose content is given to others until the next one begins."""
        self._orders: deque[Callable[[], None]] = deque()
        self._is_closed = False
        self._changed = threading.Condition()
        self._events: deque[Arrival | BaseException | None] = deque()
        self._failure: CommError | None = None
        """What ended the thread."""
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._thread = threading.Thread(target=self._guarded, name="commlayer-read", daemon=True)
        self._thread.start()

    # ---- what the user's thread calls ----

    def ask(self, question: Question) -> None:
        """Asks for another version. An event follows."""
        self._order(lambda: self._begin_asking(question))

    def event(self, wait_s: float) -> list[Arrival | BaseException | None]:
        """The next event, if there is one after `wait_s`: a complete answer, an error, which ends the question, or
        None, the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._failure, max(wait_s, 0.0))
            return [self._events.popleft()] if self._events else [self._failure] if self._failure else []

    def hold(self, held: Held, former: Held | None, pool: Pool | None) -> None:
        """Gives a version to other readers. `former`: one that is held no more, whose memory goes to the pool when no
        reader gets it any more."""

        def change() -> None:
            if self._last is not None and self._last.content is held.whole:
                self._last = None
            self._shelf.put(held.digest, held.whole)
            if self._service.address:
                self._line.say([HOLD, Head(0, version=held.version, digest=held.digest).text()])
            if former is not None:
                memory = former.memory
                give = (lambda: None) if pool is None else (lambda: pool.give(memory))
                self._shelf.remove(former.digest, former.whole, give)

        self._order(change)

    @property
    def link(self) -> Link:
        """The state of the connection to the publisher."""
        return self._line.link

    def absent(self) -> None:
        """Begins to measure anew how long the publisher is away."""
        self._line.absent()

    def close(self) -> None:
        """Ends the connections and the thread."""
        self._is_closed = True
        self._order(lambda: None)
        self._thread.join(END_S)

    def _order(self, call: Callable[[], None]) -> None:
        self._orders.append(call)
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"x")

    # ---- the thread ----

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            log.warning("commlayer.subscribe: its thread ended: %s", error, exc_info=True)
            self._is_closed = True
            self._failure = CommError(
                f"the thread of commlayer.subscribe ended: {error}; see the log, and subscribe again"
            )
            self._tell(self._failure)
        finally:
            self._line.close()
            self._service.close()
            self._context.destroy(linger=0)
            self._wake.close()
            self._woken.close()

    def _tell(self, event: Arrival | BaseException | None) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _run(self) -> None:
        limit_s: float | None = 0.0
        before_s = time.monotonic()
        while not self._is_closed:
            ready = dict(self._poller.poll(None if limit_s is None else 1e3 * limit_s))
            now_s = time.monotonic()
            self._awake_s += min(now_s - before_s, 2 * LOOK_S)
            before_s = now_s
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            while self._orders:
                self._orders.popleft()()
            self._look()
            limits_s = [] if self._ask() else [AGAIN_S]
            self._hear()
            if self._unheard_s is not None:
                limits_s.append(LOOK_S)
                self._check_heard()
            self._hear_peers()
            if self._arrival is not None:
                limits_s.append(LOOK_S)
                self._look_at_sources(self._arrival)
            self._service.serve(ready)
            if self._arrival is not None:
                self._tell_passed(self._arrival)
            limits_s += [PUSH_S] * self._service.is_asked
            limit_s = min(limits_s) if limits_s else None

    # ---- the publisher ----

    def _look(self) -> None:
        """Follows the connection."""
        if self._line.look():
            self._is_asked = False
            self._service.open(self._endpoint, self._poller)
            self._count_break()

    def _count_break(self) -> None:
        """A new connection: an answer that was on its way is over."""
        if self._arrival is None:
            return
        version = self._arrival.head.version
        self._drop()
        self._breaks += 1
        log.warning("the connection to %s ended within version %d: asking anew", self._address, version)
        if self._breaks >= BREAKS:
            self._breaks = 0
            held = self._question.held if self._question is not None else None
            self._fail(
                PeerLostError(
                    f"the connection to {self._address} ended {BREAKS} times within a version, at last {version}; this "
                    f"reader holds {'nothing' if held is None else f'version {held.version}'}. Look at the link: it "
                    f"must carry 64 kB/s and stay for as long as a version takes; the next call asks again"
                )
            )

    def _begin_asking(self, question: Question) -> None:
        self._question, self._is_asked = question, False

    def _ask(self) -> bool:
        """Asks, if there is a question that has not left on this connection. False: it must try again soon."""
        if self._question is None or self._is_asked or not self._line.link.is_up:
            return True
        head, address = self._question.head, self._service.address
        text = Head(self._asked + 1, head.life, head.version, head.digest, head.layout, address=address).text()
        if not self._line.say([ASK, text]):
            return False
        self._asked += 1
        self._is_asked = True
        self._unheard_s = self._awake_s
        return True

    def _check_heard(self) -> None:
        """The publisher is there, but does not say that it has heard the question."""
        if self._unheard_s is None or not self._line.link.is_up or self._awake_s - self._unheard_s < HEARD_S:
            return
        self._unheard_s = None
        self._fail(
            MismatchError(
                f"the publisher at {self._address} is connected, and has not said within {HEARD_S:g} s that it has "
                f"heard the question of this reader, commlayer {RELEASE} (messages of version {PROTOCOL}): it is "
                f"of an earlier release (version {PROTOCOL - 1} or below), or its process hangs. Install one release "
                f"of commlayer at the publisher and at its readers; the next call asks again"
            )
        )

    def _fail(self, error: BaseException) -> None:
        """Ends the question with an error: the next call asks again."""
        self._drop()
        self._question = None
        self._tell(error)

    def _drop(self) -> None:
        """Ends an answer that is not complete."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None and self._is_shelved and arrival.content is not None:
            self._shelf.remove(arrival.plan.name, arrival.content)

    def _hear(self) -> None:
        """Takes messages of the publisher."""
        for frames in self._line.hear():
            try:
                if len(frames) != 3:
                    raise ValueError(f"a message of {len(frames)} frames")
                self._take(*[frame.buffer for frame in frames])
            except MismatchError as error:
                self._fail(error)
            except OtherReleaseError as error:
                self._fail(MismatchError(f"the publisher at {self._address} has another release: {error}"))
            except ValueError as error:
                damage = CommError(
                    f"{self._address} sent a message that is damaged: {error}; look at its log, and at the network"
                )
                damage.__cause__ = error
                self._fail(damage)

    def _take(self, frame: memoryview, text: memoryview, piece: memoryview) -> None:
        """Takes a message of the publisher. It must keep no frame."""
        kind, arrival, now_s = bytes(frame), self._arrival, self._awake_s
        self._unheard_s = None
        if kind in (TEXT, PART, LAST):
            place = Place.read(text)
            if arrival is None or not arrival.is_own(place):
                return
            if kind == PART:
                arrival.add(place, piece, PUBLISHER, now_s)
            elif kind == LAST:
                arrival.end(piece, now_s)
            else:
                arrival.add_text(place, piece, now_s)
        else:
            head = Head.read(bytes(text))
            if kind == END:
                self._tell(None)
            if kind in (END, HEARD):
                return
            if head.request != self._asked or self._question is None:
                return
            self._drop()
            arrival = self._begun(self._question, kind, head, Plan.read(bytes(piece)), now_s)
            self._arrival, self._is_shelved, self._took = arrival, False, 0
        self._advance(arrival)

    def _begun(self, question: Question, kind: bytes, head: Head, plan: Plan, now_s: float) -> Arrival:
        """An answer that begins."""
        held = question.held
        if held is not None and head.life != question.life and head.version <= held.version:
            raise MismatchError(
                f"the publisher at {self._address} began anew, at version {head.version}; this reader holds "
                f"{held.version} of its former life, and versions grow; subscribe anew to go back"
            )
        for source in plan.sources:
            if source != PUBLISHER and not swarm.is_loopback(swarm.address_of(source)) and self._is_local:
                raise ValueError(f"{source} is on another host, and there is no secret")
        arrival = Arrival(kind, head, plan, held, question.pool, now_s)
        if not arrival.is_whole and (held is None or (head.life, head.base) != (question.life, held.version)):
            raise ValueError(f"a difference to version {head.base}")
        return arrival

    def _advance(self, arrival: Arrival) -> None:
        """After something of an answer has come."""
        if arrival.book is None or arrival.content is None:
            return
        if not self._is_shelved:
            self._is_shelved = True
            last, self._last = self._last, None
            if last is not None and last.content is not None:
                self._shelf.remove(last.plan.name, last.content)
            self._shelf.put(arrival.plan.name, arrival.content, arrival.book)
            self._peers.keep(arrival.plan.sources)
            for seat in arrival.book.open_seats():
                self._peers.want(arrival.book.sources[seat], self._want(arrival, seat))
        if arrival.is_complete:
            if arrival.plan.is_shared:
                self._line.say([DONE, Head(arrival.head.request).text()])
            self._arrival, self._question, self._last, self._breaks = None, None, arrival, 0
            self._tell(arrival)

    # ---- other readers ----

    def _want(self, arrival: Arrival, seat: int, why: str = "") -> Want:
        """The missing parts of a seat."""
        at = 0 if arrival.book is None else len(arrival.book.come[seat])
        plan = arrival.plan
        return Want(arrival.head.request, plan.name, seat, len(plan.sources), plan.deal, at, why)

    def _tell_passed(self, arrival: Arrival) -> None:
        """Tells the publisher that parts have passed through this reader, so that it deals others to it."""
        if not arrival.plan.deal or arrival.book is None:
            return
        passed = self._shelf.passed(arrival.plan.name, arrival.plan.own)
        want = self._want(arrival, arrival.plan.own)
        if passed > self._took and self._line.say([TOOK, dataclasses.replace(want, at=passed).text()]):
            self._took = passed

    def _hear_peers(self) -> None:
        """Takes messages of other readers that give parts."""
        for address, frames in self._peers.hear():
            arrival = self._arrival
            if arrival is None or arrival.book is None:
                continue
            try:
                frame, text, piece = [frame.buffer for frame in frames]
                kind = bytes(frame)
                if kind == GONE:
                    want = Want.read(bytes(text))
                    if want.request == arrival.head.request and want.seat in arrival.book.open_seats(address):
                        self._turn(arrival, want.seat, "")
                elif kind != PART:
                    raise ValueError(f"a message of kind {kind!r:.40}")
                elif arrival.is_own(place := Place.read(text)):
                    arrival.add(place, piece, address, self._awake_s)
                    self._advance(arrival)
            except ValueError as error:
                self._blame(arrival, address, str(error))

    def _look_at_sources(self, arrival: Arrival) -> None:
        """Replaces those that fail."""
        if arrival.book is None:
            return
        failures = self._peers.failures()
        for seat in arrival.book.late(self._awake_s):
            failures.setdefault(arrival.book.sources[seat], "it was late")
        for address, why in failures.items():
            self._blame(arrival, address, why)

    def _blame(self, arrival: Arrival, address: str, why: str) -> None:
        """A reader has failed: what it should give is asked of the publisher."""
        if arrival.book is None:
            return
        seats = arrival.book.open_seats(address)
        self._peers.drop(address)
        if seats:
            log.warning("commlayer.subscribe: the reader at %s failed: %s; asking %s", address, why, self._address)
        for seat in seats:
            self._turn(arrival, seat, why)

    def _turn(self, arrival: Arrival, seat: int, why: str) -> None:
        """Asks the publisher for the rest of a seat."""
        if arrival.book is not None:
            arrival.book.turn_to_publisher(seat)
            self._line.say([LACK, self._want(arrival, seat, why).text()])
