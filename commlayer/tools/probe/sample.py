"""A sample: the measurements of one path in one direction, and their sum over several passes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .flow import Flow
from .train import gilbert


class Way(NamedTuple):
    """A path in one direction: from an interface of one host to an interface of another, by index of the host."""

    source: int
    source_nic: str
    target: int
    target_nic: str

    @property
    def back(self) -> Way:
        """The same path in the other direction."""
        return Way(self.target, self.target_nic, self.source, self.source_nic)


@dataclass
class Crossed:
    """Figures of a path while all hosts send at once."""

    rate_bps: float
    is_own_limit: bool
    rtt_us: list[float]
    """Round trips: p50, p99."""
    sent: int
    lost: int


@dataclass
class Sample:
    """Figures of one `Way`."""

    way: Way
    network: str
    """The subnet, or "routed"."""
    is_reached: bool = False
    """Whether pings were answered. If not, all else is empty."""
    rate_bps: float = 0.0
    is_own_limit: bool = True
    """Whether the probe, and not the network, was the bottleneck: the rate is a lower bound."""
    rtt_us: list[float] = field(default_factory=list)
    """Idle round trips: p50, p99."""
    loaded_rtt_us: list[float] = field(default_factory=list)
    """Round trips while this direction carries all that it can: p50, p99."""
    sent: int = 0
    lost: int = 0
    bursts: int = 0
    reordered: int = 0
    overflowed: int = 0
    mtu: int = 0
    """The largest IP packet that arrives unfragmented."""
    interface_mtu: int = 0
    """The smaller MTU of the two interfaces."""
    dscp: dict[str, int | None] = field(default_factory=dict)
    """DSCP sent: DSCP that arrived; None: no packet with it arrived."""
    ecn: dict[str, int | None] = field(default_factory=dict)
    """The same for the two ECN bits: 2 is ECT(0), 3 is CE."""
    flows: list[Flow] = field(default_factory=list)
    """The same path from several source ports; empty: not measured."""
    flows_rate_bps: float = 0.0
    """The rate of all source ports at once."""
    crossed: Crossed | None = None
    """The measurement while all hosts sent at once; None: there was none."""
    cpu_waits: dict[str, list[float]] = field(default_factory=dict)
    """For each phase, the largest shares of its time for which the source, and the target, waited for a CPU."""

    @property
    def loss(self) -> float:
        """Share of packets that the network lost."""
        return self.lost / self.sent if self.sent else 0.0

    @property
    def burst_packets(self) -> float:
        """Mean number of packets lost in a row."""
        return self.lost / self.bursts if self.bursts else 0.0

    def add(self, other: Sample) -> None:
        """Adds the figures of a later pass: the better rate, the shorter round trips, all packets."""
        self.is_reached |= other.is_reached
        if other.rate_bps > self.rate_bps:
            self.rate_bps, self.is_own_limit = other.rate_bps, other.is_own_limit
        self.rtt_us = _shorter(self.rtt_us, other.rtt_us)
        self.loaded_rtt_us = _shorter(self.loaded_rtt_us, other.loaded_rtt_us)
        for name in ("sent", "lost", "bursts", "reordered", "overflowed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.mtu = max(self.mtu, other.mtu)
        self.interface_mtu = other.interface_mtu or self.interface_mtu
        self._add_flows(other.flows)
        self.flows_rate_bps = max(self.flows_rate_bps, other.flows_rate_bps)
        if other.crossed and (self.crossed is None or other.crossed.rate_bps > self.crossed.rate_bps):
            self.crossed = other.crossed
        for phase, waits in other.cpu_waits.items():
            self.cpu_waits[phase] = min(waits, self.cpu_waits.get(phase, waits), key=max)
        for mine, theirs in ((self.dscp, other.dscp), (self.ecn, other.ecn)):
            mine.update({sent: arrived for sent, arrived in theirs.items() if mine.get(sent) != int(sent)})

    def _add_flows(self, others: list[Flow]) -> None:
        known = {flow.port: flow for flow in self.flows}
        for flow in others:
            if flow.port in known:
                known[flow.port].add(flow)
            else:
                self.flows.append(flow)

    @property
    def table(self) -> dict[str, Any]:
        """Plain values, for JSON. `loss`, `burst_packets` and `gilbert` are computed from the others."""
        table = dataclasses.asdict(self)
        good_ends, bad_ends = gilbert(self.sent, self.lost, self.bursts)
        return {
            **self.way._asdict(),
            **{name: value for name, value in table.items() if name != "way"},
            "loss": self.loss,
            "burst_packets": self.burst_packets,
            "gilbert": {"good_ends": good_ends, "bad_ends": bad_ends},
        }

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Sample:
        """Inverse of `table`."""
        way = Way(*(table[name] for name in Way._fields))
        names = [entry.name for entry in dataclasses.fields(cls) if entry.name != "way"]
        values = {name: table[name] for name in names}
        values["flows"] = [Flow(**flow) for flow in table["flows"]]
        values["crossed"] = Crossed(**table["crossed"]) if table["crossed"] else None
        return cls(way=way, **values)


def _shorter(one: list[float], other: list[float]) -> list[float]:
    return min(filter(None, (one, other)), default=[])
