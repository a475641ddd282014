"""A fault with a time: what happens to a link while the command runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .table import check

Action = Literal["link_down", "link_up", "rate", "loss"]


@dataclass(frozen=True)
class Event:
    """One line of the timetable."""

    at_s: float
    """Seconds after the start of the command."""
    action: Action
    """`link_down` is a pulled cable: the interface stays, without carrier. A switch that silently swallows packets is
    `loss` with loss = 1."""
    host: int
    nic: int | None = None
    """None: all NICs of the host."""
    rate_bps: float | None = None
    """With `rate`: the new one."""
    loss: float | None = None
    """With `loss`: the new one."""
    loss_burst_packets: float = 1.0
    """With `loss`: the mean length of bursts."""

    def __post_init__(self) -> None:
        check(self.at_s >= 0, "at_s", self.at_s, "use seconds after the start, 0 or more")
        for key, value in (("rate_bps", self.rate_bps), ("loss", self.loss)):
            wanted = self.action == key.removesuffix("_bps")
            check(not wanted or value is not None, "action", self.action, f"needs {key}")
            check(wanted or value is None, key, value, f"action {self.action} has none: leave it out")
        check(self.rate_bps is None or self.rate_bps > 0, "rate_bps", self.rate_bps, "use more than 0")
        check(self.loss is None or 0 <= self.loss <= 1, "loss", self.loss, "use a share from 0 to 1")

    def __str__(self) -> str:
        rate = "" if self.rate_bps is None else f" {self.rate_bps / 1e6:g} Mbit/s"
        loss = "" if self.loss is None else f" {self.loss:.2%}"
        where = "all NICs" if self.nic is None else f"NIC {self.nic}"
        return f"{self.action}{rate}{loss} at host {self.host}, {where}"
