"""Statistics of packets in a row: loss and its bursts, reordering, rate, queueing delay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..bench import samples
from .cpu import Cpu

_SETTLED = 0.3  # share of a burst that fills token buckets and queues, and does not count for the rate


@dataclass
class Train:
    """Packets that were sent in a row, numbered from 0, as they arrived."""

    numbers: list[int] = field(default_factory=list)
    sent_ns: list[int] = field(default_factory=list)
    arrived_ns: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """The socket's counter of packets that it had no room for, at each arrival."""
    size: int = 0
    dropped_before: int = 0
    dropped_after: int = 0
    began: Cpu | None = None
    """The waiting of the receiving thread before the first packet."""

    def add(self, number: int, sent_ns: int, arrived_ns: int, dropped: int, size: int) -> None:
        """Notes an arrival."""
        self.numbers.append(number)
        self.sent_ns.append(sent_ns)
        self.arrived_ns.append(arrived_ns)
        self.dropped.append(dropped)
        self.size = size


@dataclass(frozen=True)
class Summary:
    """The receiver's account of a train."""

    received: int
    overflowed: int
    """Packets that arrived at the host and found the probe's own socket full."""
    lost: int
    """Packets that the network lost."""
    bursts: int
    """Runs of lost packets."""
    reordered: int
    """Packets that arrived after one that was sent later."""
    rate_bps: float
    """UDP payload that arrived, once the burst was under way."""
    queue_p50_us: float
    """Delay on the way beyond that of the fastest packet."""
    queue_p99_us: float
    cpu_wait: float = 0.0
    """Share of the time for which the receiver waited for a CPU."""


def summarize(train: Train, sent: int) -> Summary:
    """The figures of a train of `sent` packets."""
    gaps, reordered = lost_runs(train, sent)
    overflowed = _risen(train.dropped_before, train.dropped_after)
    delays = [arrived - sent_at for arrived, sent_at in zip(train.arrived_ns, train.sent_ns, strict=True)]
    least = min(delays, default=0)
    queue_us = [(delay - least) / 1e3 for delay in delays]
    return Summary(
        received=len(set(train.numbers)),
        overflowed=overflowed,
        lost=sum(gaps),
        bursts=len(gaps),
        reordered=reordered,
        rate_bps=_rate_bps(train),
        queue_p50_us=percentile(queue_us, 50),
        queue_p99_us=percentile(queue_us, 99),
    )


def lost_runs(train: Train, sent: int) -> tuple[list[int], int]:
    """The lengths of the runs of packets that the network lost, and the number of reordered packets.

    Packets that the socket had no room for are taken off the gap in which its counter rose.
    """
    seen: dict[int, int] = {}
    latest, reordered = -1, 0
    for number, dropped in zip(train.numbers, train.dropped, strict=True):
        if number in seen or number >= sent:
            continue
        seen[number] = dropped
        reordered += number < latest
        latest = max(latest, number)
    runs = []
    previous, counter = -1, train.dropped_before
    for number, dropped in [*sorted(seen.items()), (sent, train.dropped_after)]:
        missing = number - previous - 1
        if missing > 0:
            lost = missing - min(missing, _risen(counter, dropped))
            runs += [lost] * (lost > 0)
        previous, counter = number, dropped
    return runs, reordered


def _rate_bps(train: Train) -> float:
    count = len(train.numbers)
    first = int(count * _SETTLED)
    if count - first < 2:
        return 0.0
    span_ns = train.arrived_ns[-1] - train.arrived_ns[first]
    overflowed = _risen(train.dropped[first], train.dropped[-1])
    return (count - 1 - first + overflowed) * train.size * 8e9 / span_ns if span_ns > 0 else 0.0


def _risen(before: int, after: int) -> int:
    """The rise of a counter of 32 bits; 0 where a reordered packet shows an older value."""
    rise = (after - before) % (1 << 32)
    return rise if rise < 1 << 31 else 0


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    return samples.percentile(values, percent) if values else 0.0


def gilbert(sent: int, lost: int, bursts: int) -> tuple[float, float]:
    """Gilbert's two states (1960), the bad one losing every packet: the chance that a packet ends the good state, and
    the bad state. (0, 1) without losses."""
    if not lost or not bursts:
        return 0.0, 1.0
    return min(1.0, bursts / max(1, sent - lost)), bursts / lost
