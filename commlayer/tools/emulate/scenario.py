"""A network and its stress as data: the contents of a scenario's TOML file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .. import toml_file
from . import table, tcp
from .event import Event
from .link import Link
from .table import check
from .traffic import Cross, Flow, Incast

HOSTS_MAX = 150
NICS_MAX = 16
_SHIPPED = Path(__file__).parent / "scenarios"


def shipped() -> list[str]:
    """Names of the scenarios that come with commlayer."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def _locate(where: str | Path) -> Path:
    """The file of a scenario: `where` is its path, or the name of a shipped one."""
    path = Path(where)
    if path.is_file() or path.suffix or len(path.parts) != 1:
        return path
    if path.name not in shipped():
        raise ConfigError(f"scenario {path.name!r}: no such file here; shipped scenarios: {', '.join(shipped())}")
    return _SHIPPED / f"{path.name}.toml"


@dataclass(frozen=True)
class Unlike:
    """Differences of one host's links from the description of the NICs; None: no difference."""

    host: int
    nic: int | None = None
    """None: all NICs of the host."""
    rate_bps: float | None = None
    loss: float | None = None
    loss_burst_packets: float | None = None
    delay_ms: float | None = None
    buffer_packets: int | None = None
    bleach_dscp: bool | None = None
    bleach_ecn: bool | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of `Link` that differ."""
        fields = dataclasses.asdict(self)
        return {key: value for key, value in fields.items() if key not in ("host", "nic") and value is not None}


@dataclass(frozen=True)
class Scenario:
    """Hosts joined by one switch per NIC."""

    hosts: int = 2
    nics: tuple[Link, ...] = (Link(),)
    """[[nic]]: the NICs every host has, `eth0` first."""
    links: tuple[Unlike, ...] = ()
    """[[link]]: the hosts with other links."""
    ranks_per_host: int = 1
    tcp_congestion_control: tuple[str, ...] = ()
    """Congestion controls that processes inside may choose. The kernel has one list per machine: see tcp.py."""
    cross: tuple[Cross, ...] = ()
    """[[cross]]: steady flows from hosts outside the job."""
    incast: tuple[Incast, ...] = ()
    """[[incast]]: simultaneous bursts from hosts outside the job."""
    events: tuple[Event, ...] = ()
    """[[event]]: the timetable."""

    def __post_init__(self) -> None:
        check(1 <= self.hosts <= HOSTS_MAX, "hosts", self.hosts, f"use 1 to {HOSTS_MAX}")
        check(1 <= len(self.nics) <= NICS_MAX, "nic", len(self.nics), f"describe 1 to {NICS_MAX} NICs")
        check(1 <= self.ranks_per_host <= 256, "ranks_per_host", self.ranks_per_host, "use 1 to 256")
        for name in self.tcp_congestion_control:
            check(tcp.is_name(name), "tcp_congestion_control", name, "use names as cubic or bbr, each in quotes")
        places = [(f"link[{number}]", "host", unlike.host, unlike.nic) for number, unlike in enumerate(self.links)]
        places += [(where, "to", flow.to, flow.nic) for where, flow in self._named_flows]
        places += [(f"event[{number}]", "host", event.host, event.nic) for number, event in enumerate(self.events)]
        remedy = f"there are {self.hosts} hosts with {len(self.nics)} NIC(s), counted from 0"
        for where, key, host, nic in places:
            check(0 <= host < self.hosts, f"{where}.{key}", host, remedy)
            check(0 <= (nic or 0) < len(self.nics), f"{where}.nic", nic, remedy)
        for number, unlike in enumerate(self.links):
            known = [field.name for field in dataclasses.fields(Unlike) if field.name not in ("host", "nic")]
            remedy = f"the link is like all others: say how it differs, by {', '.join(known)}, or leave it out"
            check(bool(unlike.changes), f"link[{number}].host", unlike.host, remedy)
            try:
                self.host_links(unlike.host)
            except ConfigError as error:
                raise ConfigError(f"link[{number}].{error}") from None
        for where, flow in self._named_flows:
            target = self.link(flow.to, flow.nic)
            shaped = target.rate_bps is not None
            check(
                shaped, f"{where}.to", flow.to, "the link has no rate_bps, of which the traffic takes a share; set one"
            )
            try:
                flow.source_link(target)
            except ConfigError as error:
                raise ConfigError(f"{where}: the links of its senders would have {error}") from None
        for number, event in enumerate(self.events):
            shaped = all(self.link(event.host, nic).rate_bps is not None for nic in self.nics_of(event.nic))
            check(
                event.action != "rate" or shaped,
                f"event[{number}].action",
                event.action,
                "the link has no rate_bps; set one",
            )

    @classmethod
    def read(cls, where: str | Path) -> Scenario:
        """The scenario in a TOML file, or the shipped one of that name.

        Raises ConfigError naming the file, the key, the value and the remedy.
        """
        return toml_file.read(_locate(where), cls.from_table)

    @classmethod
    def from_table(cls, content: dict[str, Any]) -> Scenario:
        """Inverse of `table`. Raises ConfigError."""
        return table.read(cls, content)

    def __str__(self) -> str:
        parts = [f"{self.hosts} hosts", *(f"NIC {number}: {nic}" for number, nic in enumerate(self.nics))]
        for unlike in self.links:
            nic = "" if unlike.nic is None else f" NIC {unlike.nic}"
            changes = ", ".join(f"{key} {value:g}" for key, value in unlike.changes.items())
            parts.append(f"host {unlike.host}{nic}: {changes}")
        parts += [f"cross traffic of {flow.share:.0%} to host {flow.to} ({flow.protocol})" for flow in self.cross]
        parts += [f"{flow.senders}-to-1 incast to host {flow.to} ({flow.protocol})" for flow in self.incast]
        parts += [f"{len(self.events)} events"] * bool(self.events)
        return "; ".join(parts)

    @property
    def table(self) -> dict[str, Any]:
        """The contents of the TOML file, as plain values."""
        return table.table_of(self)

    @property
    def flows(self) -> list[Flow]:
        """All traffic from hosts outside the job."""
        return [flow for _, flow in self._named_flows]

    @property
    def _named_flows(self) -> list[tuple[str, Flow]]:
        flows: list[tuple[str, Flow]] = [(f"cross[{number}]", flow) for number, flow in enumerate(self.cross)]
        flows += [(f"incast[{number}]", flow) for number, flow in enumerate(self.incast)]
        return flows

    def nics_of(self, nic: int | None) -> list[int]:
        """The one NIC, or all."""
        return list(range(len(self.nics))) if nic is None else [nic]

    def host_links(self, host: int) -> list[Link]:
        """The links of one host, by NIC."""
        links = list(self.nics)
        for unlike in self.links:
            if unlike.host == host:
                for nic in self.nics_of(unlike.nic):
                    links[nic] = dataclasses.replace(links[nic], **unlike.changes)
        return links

    def link(self, host: int, nic: int = 0) -> Link:
        """The link of one NIC of one host."""
        return self.host_links(host)[nic]

    @property
    def payload_gb_s(self) -> float | None:
        """Best possible rate of UDP payload of one host, in GB/s over all NICs; None if one is not shaped.

        busbw is compared with it: an ideal all-reduce sends 2(n-1)/n of the data through each host's links, and ends
        with the slowest host.
        """
        rates = [[link.payload_gb_s for link in self.host_links(host)] for host in range(self.hosts)]
        sums = [sum(rate for rate in host if rate is not None) for host in rates if None not in host]
        return min(sums) if len(sums) == len(rates) else None
