"""A rank's outgoing link in the discrete-event model: one transfer at a time, in FIFO order or by class."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError

Discipline = Literal["fifo", "class"]
Urgency = tuple[int, ...]
"""The smaller, the more urgent. One value per class: the model has as many classes as there are buckets."""


@dataclass(frozen=True)
class Network:
    """How ranks send.

    Raises:
        ConfigError: unknown discipline, or a negative latency.
    """

    discipline: Discipline = "class"
    """fifo: in order of submission (NCCL, gloo). class: the most urgent transfer first, at once, as commlayer's packets
    do; sends between stages before reductions, reductions by next use (`stale` ones in order of submission)."""
    latency_s: float = 0.0
    """Seconds from the last byte's departure to its arrival. A reduction takes two (reduce-scatter, all-gather)."""
    shared: bool = True
    """Whether sends between stages use the link of the reductions. False: a link of their own."""
    hosts: tuple[int, ...] = ()
    """The host of each rank of the pipeline. Ranks of one host share its link to the others; within a host each rank
    has its own. Empty: all have their own."""
    leaves_host: tuple[bool, ...] = ()
    """With `hosts`: whether each rank's reductions leave its host."""

    def __post_init__(self) -> None:
        if self.discipline not in ("fifo", "class"):
            raise ConfigError(f"discipline={self.discipline!r} is unknown; use 'fifo' or 'class'")
        if len(self.hosts) != len(self.leaves_host):
            raise ConfigError(f"hosts={self.hosts} and leaves_host={self.leaves_host}: give one entry of each per rank")
        if not self.latency_s >= 0:
            raise ConfigError(f"latency_s={self.latency_s} is negative; give seconds of at least 0")


class Clock:
    """The time of the model, and what happens at which moment. Events of one moment run in the order of their `at`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.number = 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, event: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, event))

    def run(self) -> None:
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()


@dataclass
class Transfer:
    """Bytes on a link, as the seconds that they occupy it."""

    name: str
    left_s: float
    urgency: Urgency
    done: Callable[[], None]


class Link:
    """Serves transfers one after another. By class, a more urgent one interrupts the one in service (packets)."""

    def __init__(self, clock: Clock, discipline: Discipline, record: Callable[[str, float, float], None]) -> None:
        self.clock = clock
        self.by_class = discipline == "class"
        self.record = record
        self.waiting: list[tuple[Urgency, int, Transfer]] = []
        self.serving: tuple[Urgency, int, Transfer] | None = None
        self.started = 0.0
        self.number = 0
        self.load_s = 0.0  # the load of all transfers so far

    def send(self, transfer: Transfer) -> None:
        self.number += 1
        self.load_s += transfer.left_s
        urgency = transfer.urgency if self.by_class else ()
        heapq.heappush(self.waiting, (urgency, self.number, transfer))
        if self.serving is not None and urgency < self.serving[0]:
            self._interrupt(self.serving)
        if self.serving is None:
            self._serve()

    def _interrupt(self, entry: tuple[Urgency, int, Transfer]) -> None:
        transfer = entry[2]
        self.record(transfer.name, self.started, self.clock.now)
        transfer.left_s -= self.clock.now - self.started
        heapq.heappush(self.waiting, entry)
        self.serving = None

    def _serve(self) -> None:
        entry = heapq.heappop(self.waiting)
        self.serving, self.started = entry, self.clock.now
        start = self.started

        def end() -> None:
            if self.serving is entry and self.started == start:  # it was not interrupted since
                self.record(entry[2].name, start, self.clock.now)
                self.serving = None
                if self.waiting:
                    self._serve()
                entry[2].done()

        self.clock.at(start + entry[2].left_s, end)
