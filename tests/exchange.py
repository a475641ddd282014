"""Readers that give each other the parts of a version, in virtual time: the code that decides who sends which part to
whom is that of `commlayer.weights`; sockets, links and clocks are drawn here.

A host's link has one rate in each direction. The connections that share it divide it by weights (max-min), as TCP does,
but for what it loses and for its starts. What has left arrives after a delay, which stands for the queues of switches.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from commlayer.weights import swarm
from commlayer.weights.answer import Departure, Place
from commlayer.weights.content import Whole
from commlayer.weights.deal import Deal
from commlayer.weights.message import LAST, PART, WHOLE, WINDOW, Head, Plan, Want
from commlayer.weights.outlet import Outlet
from commlayer.weights.parts import PUBLISHER, Book
from commlayer.weights.shelf import Shelf

LOOK_S = 0.5
"""Time between two looks whether a source is late, and whether the parts of a deal move."""

HEAD_BYTES = 300
KERNEL_MESSAGES = 1
"""Messages of a connection that the kernel has taken, besides the window of the program."""

NAME, REQUEST = "version", 1
PUBLISHERS = 0
"""The publisher's host; readers have the numbers from 1 on."""


@dataclasses.dataclass
class Connection:
    """What one host sends to another one, in order."""

    weight: float
    """Its share of a link, beside those of other connections."""
    queue: deque[tuple[float, list[Any]]] = dataclasses.field(default_factory=deque)
    """Messages, and how many bytes of each are to be sent."""


class Wire(Outlet):
    """The outlet of one host."""

    def __init__(self, exchange: Exchange, host: int) -> None:
        self._exchange, self._host, self.sent_bytes = exchange, host, 0

    def say(self, identity: bytes, frames: list[Any]) -> bool:
        """Whether there was room for a message."""
        other = int(identity)
        if other in self._exchange.gone:
            raise ConnectionError
        queue = self._exchange.connection(self._host, other).queue
        if len(queue) >= WINDOW + KERNEL_MESSAGES:
            return False
        size = len(frames[2]) + HEAD_BYTES
        queue.append((float(size), frames))
        self.sent_bytes += size
        return True


class Reading:
    """A reader: the decisions of `Intake`, without its sockets."""

    def __init__(self, exchange: Exchange, host: int) -> None:
        self._exchange, self.host = exchange, host
        self.shelf = Shelf()
        self.wire = Wire(exchange, host)
        self.plan: Plan | None = None
        self.book: Book | None = None
        self.came: list[int] = []
        """The parts that came, with those that came twice."""
        self.end_s: float | None = None
        self.turned: set[int] = set()
        """The seats whose source was replaced."""
        self._took = 0

    def take(self, sender: int, frames: list[Any]) -> None:
        """Takes a message of the publisher or of another reader."""
        now_s = self._exchange.now_s
        if frames[0] == WHOLE:
            self.plan = Plan.read(frames[2])
            self.book = Book(self.plan.sources, now_s, self.plan.deal)
            self.shelf.put(NAME, self._exchange.content, self.book)
            for seat in self.book.open_seats():
                self._exchange.ask(self, self.plan.sources[seat], self.want(seat))
        elif self.book is None:
            raise AssertionError("a part before the plan")
        elif frames[0] == LAST:
            self.book.end([count for (count,) in struct.iter_unpack("<Q", frames[2])], now_s)
        elif frames[0] == PART:
            place = Place.read(frames[1])
            self.came.append(place.number)
            source = PUBLISHER if sender == PUBLISHERS else address(sender)
            if self.book.is_next(place.seat, place.at, place.number, source):
                self.book.add(place.seat, place.number, now_s)
        else:
            raise AssertionError(frames[0])
        if self.book.is_complete and self.end_s is None:
            self.end_s = now_s
            self._exchange.done(self)

    def want(self, seat: int, why: str = "") -> Want:
        """The missing parts of a seat."""
        assert self.plan is not None
        assert self.book is not None
        return Want(REQUEST, NAME, seat, len(self.plan.sources), self.plan.deal, len(self.book.come[seat]), why)

    def turn(self, source: str, why: str) -> None:
        """A source has failed: the publisher gives the rest of its seats."""
        if self.book is None or self.end_s is not None:
            return
        for seat in self.book.open_seats(source):
            self.book.turn_to_publisher(seat)
            self.turned.add(seat)
            self._exchange.lack(self, self.want(seat, why))

    def push(self) -> None:
        """Sends parts for which there is room, and tells what has passed through it."""
        self.shelf.push(self.wire)
        if self.plan is not None and self.plan.deal:
            passed = self.shelf.passed(NAME, self.plan.own)
            if passed > self._took:
                self._took = passed
                self._exchange.took(self, passed)


def address(host: int) -> str:
    """Where a reader serves."""
    return f"10.0.0.{host}:1"


class Exchange:
    """A publisher and its readers."""

    def __init__(
        self,
        size: int,
        rates: Sequence[float],
        delay_s: float = 0.0,
        weight: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`size`: bytes of the state. `rates`: of the publisher's link and of the readers', in bytes per second.
        `weight`: of a connection, for each part anew."""
        self.content = Whole(torch.empty(size, dtype=torch.uint8))
        self.now_s = 0.0
        self.gone: set[int] = set()
        """Hosts that have died."""
        self.stuck: set[int] = set()
        """Hosts whose program stands still, or whose link does."""
        self.readings = {host: Reading(self, host) for host in range(1, len(rates))}
        self._rates, self._delay_s, self._weight = rates, delay_s, weight
        self._connections: dict[tuple[int, int], Connection] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._known = {host: swarm.Reader(host, address(host)) for host in self.readings}
        self._departures: dict[bytes, Departure] = {}
        self._deals = itertools.count(1)
        self.deals: list[Deal] = []
        self.wire = Wire(self, PUBLISHERS)
        """The publisher's."""
        self._touched = set(range(len(rates)))
        """Hosts that may have something to send, or room for it."""

    # ---- what a test, or a bench, does ----

    def ask(self, reading: Reading, source: str, want: Want) -> None:
        """A reader asks another one for a seat."""
        other = next(host for host in self.readings if address(host) == source)
        self._tell(other, lambda: self.readings[other].shelf.want(b"%d" % reading.host, want))
        if other in self.gone:
            self._later(self._delay_s, lambda: reading.turn(source, "it was not reached"))

    def begin(self, hosts: Sequence[int]) -> None:
        """These readers ask for the version at one time."""
        asking = [self._known[host] for host in hosts if host not in self.gone | self.stuck]
        holders = [known for host, known in self._known.items() if known.sent and host not in self.gone]
        deals: dict[tuple[str, ...], tuple[int, Deal]] = {}
        for known, sources in zip(asking, swarm.deal(asking, holders, self.now_s), strict=True):
            number, deal = 0, None
            if PUBLISHER in sources and len(sources) > 1:
                group = tuple(source or known.address for source in sources)
                if group not in deals:
                    deals[group] = next(self._deals), Deal(self.content, len(group), self.now_s)
                    self.deals.append(deals[group][1])
                number, deal = deals[group]
            known.sent = NAME
            plan = Plan(NAME, sources, number)
            departure = Departure(WHOLE, Head(REQUEST), plan, b"", self.content, None, deal)
            self._departures[b"%d" % known.descriptor] = departure
        self._touched.add(PUBLISHERS)

    def end(self, host: int) -> None:
        """A reader dies: its connections end."""
        self.gone.add(host)
        for pair in [pair for pair in self._connections if host in pair]:
            del self._connections[pair]
        departure = self._departures.pop(b"%d" % host, None)
        if departure is not None and departure.deal is not None:
            departure.deal.leave(departure.plan.own)
        self._touched |= {PUBLISHERS, *self.readings}
        for reading in self.alive:
            reading.shelf.forget(b"%d" % host)
            reading.turn(address(host), "its connection ended")

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Something that happens later."""
        heapq.heappush(self._events, (time_s, next(self._numbers), call))

    @property
    def alive(self) -> list[Reading]:
        """The readers that have not died."""
        return [reading for host, reading in self.readings.items() if host not in self.gone]

    def run(self, until_s: float = math.inf) -> None:
        """Until nothing more happens, or all readers that live have the version."""
        look_s = 0.0
        while self.now_s < until_s and any(
            reading.end_s is None for reading in self.alive if reading.host not in self.stuck
        ):
            if self.now_s >= look_s:
                look_s = self.now_s + LOOK_S
                self.at(look_s, lambda: None)
                self._look()
            self._push()
            self._step(until_s)

    # ---- what readers say to the publisher ----

    def done(self, reading: Reading) -> None:
        """A reader has all parts."""

        def end() -> None:
            departure = self._departures.pop(b"%d" % reading.host, None)
            if departure is not None and departure.deal is not None:
                departure.deal.leave(departure.plan.own)

        self._tell(PUBLISHERS, end)

    def took(self, reading: Reading, passed: int) -> None:
        """Parts have passed through a reader."""

        def note() -> None:
            departure = self._departures.get(b"%d" % reading.host)
            if departure is not None and departure.deal is not None:
                departure.deal.passed(departure.plan.own, passed)

        self._tell(PUBLISHERS, note)

    def lack(self, reading: Reading, want: Want) -> None:
        """A reader lacks a seat's parts."""

        def help_it() -> None:
            departure = self._departures.get(b"%d" % reading.host)
            if departure is not None:
                departure.give(want.seat, want.at)
                if departure.deal is not None:
                    departure.deal.distrust(want.seat)

        self._tell(PUBLISHERS, help_it)

    # ---- time ----

    def connection(self, sender: int, receiver: int) -> Connection:
        """From one host to another."""
        if (sender, receiver) not in self._connections:
            self._connections[sender, receiver] = Connection(self._weight())
        return self._connections[sender, receiver]

    def _tell(self, host: int, call: Callable[[], None]) -> None:
        def hear() -> None:
            if host not in self.gone | self.stuck:
                self._touched.add(host)
                call()

        self._later(self._delay_s, hear)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, call)

    def _look(self) -> None:
        self._touched |= {PUBLISHERS, *self.readings}
        for deal in self.deals:
            deal.look(self.now_s)
        for reading in self.alive:
            if reading.book is not None and reading.end_s is None and reading.host not in self.stuck:
                for source in {reading.book.sources[seat] for seat in reading.book.late(self.now_s)}:
                    reading.turn(source, "it was late")

    def _push(self) -> None:
        touched, self._touched = self._touched - self.gone - self.stuck, set()
        for host in sorted(touched):
            if host == PUBLISHERS:
                self.wire.push(self._departures)
            else:
                self.readings[host].push()

    def _step(self, until_s: float) -> None:
        """Goes on to the next event."""
        active = {
            pair: connection
            for pair, connection in self._connections.items()
            if connection.queue and not self.stuck & set(pair)
        }
        rates = dict(self._shared(active))
        next_s = min(
            (self.now_s + connection.queue[0][0] / rates[pair] for pair, connection in active.items()),
            default=math.inf,
        )
        next_s = min(next_s, self._events[0][0] if self._events else math.inf, until_s)
        gone_s, self.now_s = next_s - self.now_s, next_s
        for pair, connection in active.items():
            left, frames = connection.queue[0]
            left -= gone_s * rates[pair]
            if left > 1e-6:
                connection.queue[0] = left, frames
                continue
            connection.queue.popleft()
            connection.weight = self._weight()
            self._arrive(pair, frames)
        while self._events and self._events[0][0] <= self.now_s:
            heapq.heappop(self._events)[2]()

    def _arrive(self, pair: tuple[int, int], frames: list[Any]) -> None:
        sender, receiver = pair

        def take() -> None:
            if sender not in self.gone:
                self.readings[receiver].take(sender, frames)

        self._touched.add(sender)
        self._tell(receiver, take)

    def _shared(self, active: dict[tuple[int, int], Connection]) -> Iterator[tuple[tuple[int, int], float]]:
        """The rates of connections: weighted max-min."""
        left = {(way, host): rate for host, rate in enumerate(self._rates) for way in (0, 1)}
        open_pairs = {pair: connection.weight for pair, connection in active.items()}
        while open_pairs:
            weights = dict.fromkeys(left, 0.0)
            for (sender, receiver), weight in open_pairs.items():
                weights[0, sender] += weight
                weights[1, receiver] += weight
            way, host = min((end for end in left if weights[end]), key=lambda end: left[end] / weights[end])
            share = left[way, host] / weights[way, host]
            for pair in [pair for pair in open_pairs if pair[way] == host]:
                rate = share * open_pairs.pop(pair)
                yield pair, rate
                left[0, pair[0]] = max(left[0, pair[0]] - rate, 1e-3 * rate)
                left[1, pair[1]] = max(left[1, pair[1]] - rate, 1e-3 * rate)
