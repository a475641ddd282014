"""`Uplinks`: how long the links were full through which this process sends, one for each of its sockets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

FULL = 0.6
"""The share of a link's capacity from which on it counts as full: bytes that are lost, and those of packets that wait
for the engine thread, are missing in it."""


@dataclasses.dataclass
class Uplink:
    """One link: an interface, and all behind it on the way to the receivers."""

    interface: str
    read_s: float
    """The time at which its counters were read last."""
    carried_bytes: int
    full_s: float = 0.0
    full_bytes: int = 0
    """The bytes sent while it was full."""

    @property
    def rate_bytes(self) -> float:
        """Bytes per second that it carried while it was full."""
        return self.full_bytes / self.full_s if self.full_s else 0.0

    def read(self, path: Mapping[str, Any], now_s: float) -> None:
        """Counts the time since the last reading. `path`: the counters of a path that leaves through it."""
        passed_s, sent = now_s - self.read_s, path["carried_bytes"] - self.carried_bytes
        if passed_s > 0 and 0 < FULL * path["capacity_bytes"] * passed_s <= sent:
            self.full_s += passed_s
            self.full_bytes += sent
        self.read_s, self.carried_bytes = now_s, path["carried_bytes"]


class Uplinks:
    """The links of this process."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, int], Uplink] = {}

    def read(self, paths: Iterable[Mapping[str, Any]], now_s: float) -> None:
        """Reads the counters of all paths; several of them may leave through one link."""
        for path in {(each["address"], each["port"]): each for each in paths}.values():
            link = self._links.get((path["address"], path["port"]))
            if link is None:
                self._links[path["address"], path["port"]] = Uplink(path["interface"], now_s, path["carried_bytes"])
            else:
                link.read(path, now_s)

    def fullest(self) -> Uplink | None:
        """The link that was full for longest; None without one."""
        return max(self._links.values(), key=lambda link: link.full_s, default=None)
