"""`Watch`: logs the death and the return of paths, and at level debug their rates. It also finds full links, and gives
its readings to the flight record.

The engine counts the deaths of each path. A thread of its own reads the counters twice a second, and only if the log is
on: operations never wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CommError
from .flight import recorder
from .log import log
from .native import Engine
from .paths import pair_paths
from .uplink import Uplinks

PERIOD_S = 0.5

NOTED = ("packets_sent", "packets_lost", "datagram_bytes", "round_trip_us", "queue_us", "is_dead")
"""What the flight record has of a path."""

RATE_FACTOR = 2.0
"""The smallest change of a path's rate that is logged."""


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
