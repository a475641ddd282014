"""The active end of a measurement: one path in one direction, by pings, bursts and a steady train."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...transport.interfaces import IP_UDP_HEADER_BYTES
from . import cpu
from .account import PATIENCE_S, SPACE_S, accounts
from .flow import FlowMeasurement
from .packets import PONG, SEGMENTS_MAX, Address, Port, Sent
from .responder import read_pong
from .sample import Crossed, Sample, Way
from .train import Summary, percentile

DSCP = (46, 34, 26, 18, 8)
"""The code points by which the engine marks its priority classes (`native/engine/engine.c`)."""
ECN = (2, 3)
"""ECT(0) and CE."""

PHASES = ("reach", "rtt", "tos", "mtu", "rate", "loss", "flows")
CROSSED = "crossed"
"""A further phase, which all hosts do at once."""

MTU_LEAST = 576
PORTS_MAX = 32
"""The most of `Effort.flows`."""
_TRIES = 8
_PINGS = 100
_PING_SPACE_S = 0.001
_SHARE = 0.3  # share of the measured rate, for the steady train: no queue grows
_TRAIN_PER_S = 4000.0
_SMALLEST = 64
_BURST_PACKETS = 600  # in a burst, if it is not too long
_BURST_LIMIT_S = 1.0
_TRAIN_LIMIT_S = 2.0
_BLOCKED_SHARE = 0.1
_CROSSED_S = 0.8
_SLOWER = 0.8


@dataclass(frozen=True)
class Effort:
    """Limits of the traffic of one path in one direction."""

    burst_s: float = 0.15
    burst_bytes: int = 8 << 20
    bursts: int = 2
    train_packets: int = 2000
    """Packets by which losses are counted; fewer on slow paths."""
    flows: int = 8
    """Source ports by which parallel links are looked for; 1: they are not."""

    @property
    def bytes(self) -> int:
        """The most bytes that a path gets in one direction."""
        trains = 2 if self.flows > 1 else 1
        return (self.bursts + trains - 1) * self.burst_bytes + trains * self.train_packets * 1500 + 300_000

    @property
    def crossed_bytes(self) -> int:
        """The most bytes that a path gets while all hosts send at once."""
        return 2 * self.burst_bytes

    @property
    def seconds(self) -> float:
        """The rough time of a path in one direction."""
        one = self.burst_s + 0.1 + self.train_packets / _TRAIN_PER_S
        return one + (self.bursts - 1) * (self.burst_s + 0.1) + 0.3 + (one + 0.3 if self.flows > 1 else 0.0)

    @property
    def crossed_seconds(self) -> float:
        """The rough time of a path while all hosts send at once."""
        return _CROSSED_S + 0.3


@dataclass
class Measurement:
    """Measures the path from `port` to the address `to`."""

    port: Port
    to: Address
    sample: Sample
    effort: Effort
    run: int
    """Number of the first train; the others follow."""
    flow_ports: Sequence[Port] = ()
    """Further ports of the same address, for flows."""
    _pings: int = 0
    _rtt_s: float = 0.0
    _loaded: list[Summary] = field(default_factory=list)
    _waits: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def measure(self, phases: Sequence[str] = PHASES) -> Sample:
        """The sample. A path without an answer has nothing but that."""
        sample = self.sample
        sample.is_reached = self._reach()
        if sample.is_reached:
            for phase in (*PHASES[1:], CROSSED):
                if phase in phases:
                    self._waits, before = [0.0, 0.0], cpu.read()
                    getattr(self, f"_measure_{phase}")()
                    sample.cpu_waits[phase] = [max(self._waits[0], before.wait_until(cpu.read())), self._waits[1]]
        return sample

    # ---- pings

    def _reach(self) -> bool:
        answers = self._ask({0: {}}, tries=round(PATIENCE_S / SPACE_S))
        return bool(answers)

    def _ask(self, questions: dict[int, dict[str, int]], tries: int = _TRIES) -> dict[int, tuple[int, int]]:
        """Sends a ping for each question, again until it is answered or was tried so often. Returns TOS and size that
        arrived, by question."""
        answers: dict[int, tuple[int, int]] = {}
        numbers: dict[int, int] = {}
        for _ in range(tries):
            for question, options in questions.items():
                if question not in answers:
                    self._pings += 1
                    numbers[self._pings] = question
                    self.port.ping(self.to, self._pings, **options)
            end = time.monotonic() + SPACE_S + 1.5 * self._rtt_s
            while len(answers) < len(questions) and self.port.wait(end - time.monotonic()):
                arrival = self.port.receive()
                if arrival is not None and arrival.kind == PONG and arrival.number in numbers:
                    tos, size, _ = read_pong(arrival)
                    answers.setdefault(numbers[arrival.number], (tos, size))
                    self._rtt_s = max(self._rtt_s, (time.time_ns() - arrival.sent_ns) / 1e9)
            if len(answers) == len(questions):
                break
        return answers

    def _measure_rtt(self) -> None:
        first = self._pings + 1
        self._pings += _PINGS
        found: list[float] = []
        sent = 0
        due, end = time.monotonic(), 0.0
        while sent < _PINGS or (len(found) < _PINGS and time.monotonic() < end):
            now = time.monotonic()
            if sent < _PINGS and now >= due:
                self.port.ping(self.to, first + sent, size=_SMALLEST)
                sent += 1
                due = max(due + _PING_SPACE_S, now)
                end = now + SPACE_S + 2 * self._rtt_s
            if not self.port.wait((due if sent < _PINGS else end) - now):
                continue
            arrival, read_ns = self.port.receive(), time.time_ns()
            if arrival is not None and arrival.kind == PONG and arrival.number >= first:
                found.append(max(0, read_ns - arrival.sent_ns - read_pong(arrival)[2]) / 1e3)
        self.sample.rtt_us = [percentile(found, 50), percentile(found, 99)] if found else []

    def _measure_tos(self) -> None:
        sent = {number: code << 2 for number, code in enumerate(DSCP)}
        sent |= {len(DSCP) + number: bits for number, bits in enumerate(ECN)}
        answers = self._ask({number: {"tos": tos, "size": _SMALLEST} for number, tos in sent.items()})
        for number, tos in sent.items():
            arrived = answers[number][0] if number in answers else None
            if number < len(DSCP):
                self.sample.dscp[str(tos >> 2)] = None if arrived is None else arrived >> 2
            else:
                self.sample.ecn[str(tos)] = None if arrived is None else arrived & 3

    def _measure_mtu(self) -> None:
        headers = IP_UDP_HEADER_BYTES[self.port.version]

        def passes(mtu: int) -> bool:
            size = mtu - headers
            return self._ask({0: {"size": size}}).get(0, (0, 0))[1] == size

        good, bad = MTU_LEAST, self.sample.interface_mtu
        if passes(bad):
            good = bad
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if passes(middle) else (good, middle)
        self.sample.mtu = good

    # ---- trains

    def _measure_rate(self) -> None:
        size = self._payload_bytes()
        seconds = self.effort.burst_s
        for _ in range(self.effort.bursts):
            most = max(1, self.effort.burst_bytes // size)
            run = self._next_run()
            sent = self.port.blast(self.to, run=run, size=size, seconds=seconds, most=most)
            summary = self._end(run, sent)
            if summary is None:
                continue
            self._loaded.append(summary)
            if summary.rate_bps > self.sample.rate_bps:
                self.sample.rate_bps = summary.rate_bps
                self.sample.is_own_limit = _is_own_limit(sent, summary, size)
            if summary.rate_bps > 0:  # slow paths: a longer one
                wanted_s = _BURST_PACKETS * size * 8 / summary.rate_bps
                seconds = min(max(self.effort.burst_s, wanted_s), _BURST_LIMIT_S)
        if self._loaded and self.sample.rtt_us:
            last, idle_us = self._loaded[-1], self.sample.rtt_us[0]
            self.sample.loaded_rtt_us = [idle_us + last.queue_p50_us, idle_us + last.queue_p99_us]

    def _measure_loss(self) -> None:
        if self.sample.rate_bps <= 0:
            return
        count, size, per_s = self._train()
        run = self._next_run()
        summary = self._end(run, self.port.pace(self.to, run=run, size=size, count=count, per_s=per_s))
        if summary is None:
            return
        sample = self.sample
        sample.sent, sample.lost, sample.bursts = count, summary.lost, summary.bursts
        sample.reordered, sample.overflowed = summary.reordered, summary.overflowed

    def _measure_flows(self) -> None:
        if len(self.flow_ports) < 2:
            return
        flows = FlowMeasurement(self.flow_ports, self.to, self._rtt_s)
        flows.measure_routes()
        flows.measure_rtt()
        size = self._payload_bytes()
        if self.sample.rate_bps > 0:
            wanted_s = _BURST_PACKETS * size * 8 / self.sample.rate_bps
            seconds = min(max(self.effort.burst_s, wanted_s), _BURST_LIMIT_S)
            most = self.effort.burst_bytes // size
            self.sample.flows_rate_bps = flows.measure_rate(self._next_run(), seconds, most, size, self.sample.rate_bps)
            flows.measure_loss(self._next_run(), *self._train())
        self.sample.flows = flows.flows
        self._waits = flows.cpu_waits

    def _measure_crossed(self) -> None:
        """A burst while all other hosts send, too."""
        size = self._payload_bytes()
        run = self._next_run()
        sent = self.port.blast(self.to, run=run, size=size, seconds=_CROSSED_S, most=self.effort.crossed_bytes // size)
        summary = self._end(run, sent)
        if summary is None:
            return
        idle_us = self.sample.rtt_us[0] if self.sample.rtt_us else 0.0
        self.sample.crossed = Crossed(
            summary.rate_bps,
            _is_own_limit(sent, summary, size),
            [idle_us + summary.queue_p50_us, idle_us + summary.queue_p99_us],
            sent.packets,
            summary.lost,
        )

    def _payload_bytes(self) -> int:
        mtu = self.sample.mtu or self.sample.interface_mtu
        return mtu - IP_UDP_HEADER_BYTES[self.port.version]

    def _train(self) -> tuple[int, int, float]:
        """Packets, their size and their number per second in a steady train of a part of the measured rate."""
        rate_bps, headers = _SHARE * self.sample.rate_bps, 14 + IP_UDP_HEADER_BYTES[self.port.version]
        size = min(self._payload_bytes(), max(_SMALLEST, int(rate_bps / 8 / _TRAIN_PER_S) - headers))
        per_s = min(_TRAIN_PER_S, rate_bps / 8 / (size + headers))
        return max(20, min(self.effort.train_packets, int(_TRAIN_LIMIT_S * per_s))), size, per_s

    def _next_run(self) -> int:
        self.run += 1
        return self.run

    def _end(self, run: int, sent: Sent) -> Summary | None:
        """The receiver's account of a train; None if there is no answer."""
        summary = accounts([self.port], self.to, run, [sent.packets], self._rtt_s)[0]
        if summary is not None:
            self._waits[1] = max(self._waits[1], summary.cpu_wait)
        return summary


def _is_own_limit(sent: Sent, summary: Summary, size: int) -> bool:
    """Whether the network took all that the probe sent: no full interface, no loss, and no queue that stretched it."""
    if summary.overflowed > 0.01 / SEGMENTS_MAX * sent.packets:  # the kernel counts what it hands over at once as one
        return True
    offered_bps = sent.packets * size * 8 / sent.seconds if sent.seconds > 0 else 0.0
    is_blocked = sent.blocked_s > _BLOCKED_SHARE * sent.seconds
    return not (is_blocked or summary.lost > 0.01 * sent.packets or summary.rate_bps < _SLOWER * offered_bps)


def measure(
    port: Port, to: Address, about: dict[str, Any], run: int, flow_ports: Sequence[Port] = ()
) -> tuple[Sample, int]:
    """Measures a path as `plan.py` describes it. Returns the sample and the last train's number."""
    sample = Sample(
        Way(*about["way"]),
        about["network"],
        interface_mtu=about["interface_mtu"],
        mtu=about["mtu"],
        rate_bps=about["rate_bps"],
        rtt_us=about["rtt_us"],
    )
    measurement = Measurement(port, to, sample, Effort(**about["effort"]), run, flow_ports)
    return measurement.measure(about["phases"]), measurement.run
