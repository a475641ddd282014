"""`Watch`: logs the death and the return of paths, and at level debug their rates. It also finds full links, and gives
its readings to the flight record.

The engine counts the deaths of each path. A thread of its own reads the counters twice a second, and only if the log is
on: operations never wait for it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import CommError
from .flight import recorder
from .log import log
from .native import Engine
from .paths import pair_paths

PERIOD_S = 0.5

NOTED = ("packets_sent", "packets_lost", "datagram_bytes", "round_trip_us", "queue_us", "is_dead")
"""What the flight record has of a path."""

RATE_FACTOR = 2.0
"""The smallest change of a path's rate that is logged."""

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
        for path in {(path["address"], path["port"]): path for path in paths}.values():
            link = self._links.get((path["address"], path["port"]))
            if link is None:
                self._links[path["address"], path["port"]] = Uplink(path["interface"], now_s, path["carried_bytes"])
            else:
                link.read(path, now_s)

    def fullest(self) -> Uplink | None:
        """The link that was full for longest; None without one."""
        return max(self._links.values(), key=lambda link: link.full_s, default=None)


class Watch:
    """Watches the paths of this process's engine."""

    def __init__(self) -> None:
        self.uplinks = Uplinks()
        """The links through which this process sends."""
        self._names: dict[int, list[str]] = {}
        self._deaths: dict[tuple[int, int], int] = {}
        self._dead: set[tuple[int, int]] = set()
        self._rates: dict[tuple[int, int], float] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-watch", daemon=True)
        self._thread.start()

    def add(self, own: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> None:
        """Also watches the paths to these processes; arguments: descriptions of engines."""
        for peer in peers:
            if peer["peer"] != own["peer"]:
                self._names.setdefault(peer["peer"], names_of_paths(own, peer))

    def close(self) -> None:
        """Ends the thread."""
        self._ends.set()
        self._thread.join()

    def look(self) -> None:
        """Reads the counters once, and logs what has changed."""
        try:
            found = Engine.shared_report().paths
        except CommError:
            return  # the engine is closed
        self.uplinks.read((path for paths in found.values() for path in paths), time.monotonic())
        for peer, paths in found.items():
            for index, path in enumerate(paths):
                if peer in self._names:
                    self._look_at(peer, index, path)

    def _look_at(self, peer: int, index: int, path: Mapping[str, Any]) -> None:
        key = peer, index
        name = self._names[peer][index]
        recorder.note_path(name, {field: path[field] for field in NOTED})
        died, self._deaths[key] = path["deaths"] - self._deaths.get(key, 0), path["deaths"]
        was_dead = key in self._dead
        if path["is_dead"]:
            if not was_dead or died:
                log.warning("path %s died: it loses all packets; others carry its load", name)
            self._dead.add(key)
        elif died:
            log.warning("path %s died %s, and delivers again", name, "once" if died == 1 else f"{died} times")
        elif was_dead:
            log.info("path %s delivers again", name)
        if not path["is_dead"]:
            self._dead.discard(key)
        self._look_at_rate(key, name, path)

    def _look_at_rate(self, key: tuple[int, int], name: str, path: Mapping[str, Any]) -> None:
        if not path["round_trip_us"] or not log.isEnabledFor(logging.DEBUG):
            return
        rate = path["window_bytes"] / path["round_trip_us"]
        before = self._rates.setdefault(key, 0.0)
        if before / RATE_FACTOR < rate < before * RATE_FACTOR:
            return
        self._rates[key] = rate
        log.debug(
            "path %s may send %.4g MB/s: window %d bytes, round trip %d us, of it %d us in queues",
            *(name, rate, path["window_bytes"], path["round_trip_us"], path["queue_us"]),
        )

    def _run(self) -> None:
        while not self._ends.wait(PERIOD_S):
            try:
                self.look()
            except Exception:
                log.exception("the watch of the paths has ended")
                return


def names_of_paths(own: Mapping[str, Any], peer: Mapping[str, Any]) -> list[str]:
    """The paths to another process, by interface and address."""
    where = f"rank {peer['peer']} on {peer.get('hostname')}"
    return [
        f"{own['ports'][path.local]['ifname']} to {where} ({path.address} port {path.port})"
        for path in pair_paths(own, peer)
    ]
