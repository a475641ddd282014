"""Flows: the same path from several source ports. A fabric that chooses links by port (ECMP, bonds) carries them over
different links."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from . import cpu
from .account import SPACE_S, accounts
from .packets import PONG, Address, Port, wait_for
from .responder import read_pong
from .train import percentile

_SMALLEST = 64
_HOPS_MAX = 8
_HOP_TRIES = 3
_FAR_S = 0.02  # round trips from here on are measured by fewer pings
_CHUNK, _FAST_CHUNK = 4, 32  # packets of one port before the next has its turn
_FAST_BPS = 1e9  # packets leave at once from here on
SILENT = "*"
"""A hop that does not answer."""


@dataclass
class Flow:
    """The figures of one source port."""

    port: int
    rtt_us: float = 0.0
    """Median of the idle round trips; 0: no answer."""
    sent: int = 0
    lost: int = 0
    bursts: int = 0
    rate_bps: float = 0.0
    """Its share while all source ports send at once."""
    route: list[str] = field(default_factory=list)
    """The routers on the way; empty: none, or none that answers."""

    def add(self, other: Flow) -> None:
        """Adds the figures of a later pass."""
        self.rtt_us = min(filter(None, (self.rtt_us, other.rtt_us)), default=0.0)
        self.sent, self.lost, self.bursts = self.sent + other.sent, self.lost + other.lost, self.bursts + other.bursts
        self.rate_bps = max(self.rate_bps, other.rate_bps)
        self.route = other.route or self.route


@dataclass
class FlowMeasurement:
    """Measures the flows from `ports`, all on one address, to the address `to`."""

    ports: Sequence[Port]
    to: Address
    rtt_s: float
    flows: list[Flow] = field(init=False)

    def __post_init__(self) -> None:
        self.flows = [Flow(port.number) for port in self.ports]
        self._pings = _HOPS_MAX
        self.cpu_waits = [0.0, 0.0]
        """The largest shares of the time of a measurement for which this thread, and the receiver, waited for a CPU."""

    def measure_routes(self) -> None:
        """Finds the routers of each flow, by pings that die at the first, second, ... hop."""
        for port in self.ports:
            port.hear_errors(True)
        left = set(range(len(self.ports)))
        try:
            for hop in range(1, _HOPS_MAX + 1):
                routers, arrived = self._ask_hop(left, hop)
                left -= arrived
                for index in left:
                    self.flows[index].route.append(routers.get(index, SILENT))
                if not left or all(flow.route[-2:] == [SILENT, SILENT] for flow in (self.flows[i] for i in left)):
                    break
        finally:
            for port in self.ports:
                port.hear_errors(False)
        for flow in self.flows:
            while flow.route and flow.route[-1] == SILENT:
                flow.route.pop()

    def _ask_hop(self, asked: set[int], hop: int) -> tuple[dict[int, str], set[int]]:
        """The router at this hop, by flow, and the flows whose pings arrived."""
        routers: dict[int, str] = {}
        arrived: set[int] = set()
        for _ in range(_HOP_TRIES):
            waiting = asked - routers.keys() - arrived
            if not waiting:
                break
            for index in waiting:
                self.ports[index].ping(self.to, hop, size=_SMALLEST, hops=hop)
            end = time.monotonic() + SPACE_S + 1.5 * self.rtt_s
            while waiting:
                ready = wait_for([self.ports[index] for index in waiting], end - time.monotonic())
                if not ready:
                    break
                for index in [index for index in waiting if self.ports[index] in ready]:
                    router = self.ports[index].next_error()
                    arrival = self.ports[index].receive()
                    if router is not None:
                        routers[index] = router
                        waiting.discard(index)
                    elif arrival is not None and arrival.kind == PONG and arrival.number == hop:
                        arrived.add(index)
                        waiting.discard(index)
        return routers, arrived

    def measure_rtt(self) -> None:
        """Round trips in rounds of a ping from each port. The first port changes from round to round, as the last ping
        of a round waits for the others."""
        count, before = len(self.ports), cpu.read()
        found: list[list[float]] = [[] for _ in self.ports]
        for number in range(count if self.rtt_s > _FAR_S else 2 * count):
            first = self._pings + 1
            self._pings += count
            for step in range(count):
                index = (number + step) % count
                self.ports[index].ping(self.to, first + index, size=_SMALLEST)
            for index, rtt_us in self._pongs(first):
                found[index].append(rtt_us)
        for flow, times in zip(self.flows, found, strict=True):
            flow.rtt_us = percentile(times, 50)
        self._note_wait(before)

    def _note_wait(self, before: cpu.Cpu) -> None:
        self.cpu_waits[0] = max(self.cpu_waits[0], before.wait_until(cpu.read()))

    def _pongs(self, first: int) -> Iterator[tuple[int, float]]:
        """The round trips of the pings with the numbers from `first` on, by flow."""
        end = time.monotonic() + SPACE_S + 1.5 * self.rtt_s
        waiting = set(range(len(self.ports)))
        while waiting:
            ready = wait_for([self.ports[index] for index in waiting], end - time.monotonic())
            if not ready:
                return
            for index in [index for index in waiting if self.ports[index] in ready]:
                arrival, read_ns = self.ports[index].receive(), time.time_ns()
                if arrival is not None and arrival.kind == PONG and arrival.number == first + index:
                    waiting.discard(index)
                    yield index, max(0, read_ns - arrival.sent_ns - read_pong(arrival)[2]) / 1e3

    def measure_loss(self, run: int, count: int, size: int, per_s: float) -> None:
        """Sends `count` packets, evenly spaced, from all ports once in a round. Each round has another order: in the
        same one, a loss that comes at even times would meet some ports and not others."""
        sent = [0] * len(self.ports)
        draw = random.Random(run)  # noqa: S311  # statistics
        turns: list[int] = []
        due = time.monotonic()
        for _ in range(count):
            turns = turns or draw.sample(range(len(self.ports)), len(self.ports))
            index = turns.pop()
            self.ports[index].data(self.to, run, sent[index], size)
            sent[index] += 1
            due = max(due + 1 / per_s, time.monotonic() - 0.005)
            time.sleep(max(0.0, due - time.monotonic()))
        for flow, number, summary in zip(
            self.flows, sent, accounts(self.ports, self.to, run, sent, self.rtt_s), strict=True
        ):
            if summary is not None:
                flow.sent, flow.lost, flow.bursts = number, summary.lost, summary.bursts
                self.cpu_waits[1] = max(self.cpu_waits[1], summary.cpu_wait)

    def measure_rate(self, run: int, seconds: float, most: int, size: int, single_bps: float) -> float:
        """Sends from all ports at once, as fast as the interface takes packets, where one port carried `single_bps`.
        Returns the rate of all ports."""
        sent = [0] * len(self.ports)
        is_fast = single_bps > _FAST_BPS
        chunk, at_once = (_FAST_CHUNK, _FAST_CHUNK) if is_fast else (_CHUNK, 1)
        before = cpu.read()
        end = before.at_s + seconds
        while sum(sent) < most and time.monotonic() < end:
            for index, port in enumerate(self.ports):
                sent[index] += port.blast(
                    self.to, run=run, size=size, seconds=seconds, most=chunk, first=sent[index], at_once=at_once
                ).packets
        self._note_wait(before)
        for flow, summary in zip(self.flows, accounts(self.ports, self.to, run, sent, self.rtt_s), strict=True):
            if summary is not None:
                flow.rate_bps = summary.rate_bps
                self.cpu_waits[1] = max(self.cpu_waits[1], summary.cpu_wait)
        return sum(flow.rate_bps for flow in self.flows)
