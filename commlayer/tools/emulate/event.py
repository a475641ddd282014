"""A change of a link at a given time, while the command runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .link import check_loss, check_rate
from .table import check

Action = Literal["link_down", "link_up", "rate", "loss"]

_LATEST_S = 7 * 86400.0


@dataclass(frozen=True)
class Event:
    """One line of the timetable."""

    at_s: float
    """Seconds after the start of the command, up to a week."""
    action: Action
    """`link_down` pulls the cable: the interface stays, without carrier. For a switch that drops all packets without a
    sign, use `loss` with loss = 1."""
    host: int
    nic: int | None = None
    """None: all NICs of the host."""
    rate_bps: float | None = None
    """The new rate, with `rate`."""
    loss: float | None = None
    """The new loss, with `loss`."""
    loss_burst_packets: float = 1.0
    """The new mean length of bursts, with `loss`."""

    def __post_init__(self) -> None:
        check(0 <= self.at_s <= _LATEST_S, "at_s", self.at_s, f"use 0 to {_LATEST_S:.0f} seconds after the start")
        for key, value in (("rate_bps", self.rate_bps), ("loss", self.loss)):
            wanted = self.action == key.removesuffix("_bps")
            check(not wanted or value is not None, "action", self.action, f"needs {key}")
            check(wanted or value is None, key, value, f"action {self.action} has none: leave it out")
        remedy = f"action {self.action} has none: leave it out"
        burst_packets = self.loss_burst_packets
        check(self.action == "loss" or burst_packets == 1, "loss_burst_packets", burst_packets, remedy)
        check_rate(self.rate_bps)
        check_loss(self.loss, burst_packets)

    def __str__(self) -> str:
        rate = "" if self.rate_bps is None else f" {self.rate_bps / 1e6:g} Mbit/s"
        loss = "" if self.loss is None else f" {self.loss:.2%}"
        where = "all NICs" if self.nic is None else f"NIC {self.nic}"
        return f"{self.action}{rate}{loss} at host {self.host}, {where}"
