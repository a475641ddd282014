"""`Lags`: how often, and how long, this process has waited for each other rank of the job, over all of its groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Lag(NamedTuple):
    """The lag of one rank, as the collectives of this rank have seen it."""

    last: int
    """Operations in which the first data of that rank came after that of every other rank, and this rank waited."""
    waited_us: int
    """Microseconds from the start of these operations until that data came."""


Read = Callable[[], Mapping[int, Lag]]


class Lags:
    """The lags of the groups of one engine, those of closed groups included. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, Read] = {}
        self._closed: dict[int, Lag] = {}

    def open(self, group: int, read: Read) -> None:
        """A group was made: `read` returns the lags of its ranks by their number in the job."""
        with self._lock:
            self._groups[group] = read

    def close(self, group: int) -> None:
        """The group is about to be closed: keeps its lags."""
        with self._lock:
            read = self._groups.pop(group, None)
            if read is not None:
                _add(self._closed, read())

    def read(self) -> dict[int, Lag]:
        """The lags by rank of the job; ranks that this one never waited for are absent."""
        with self._lock:
            found = dict(self._closed)
            for read in self._groups.values():
                _add(found, read())
        return found


def _add(total: dict[int, Lag], more: Mapping[int, Lag]) -> None:
    for rank, lag in more.items():
        if lag.last:
            before = total.get(rank, Lag(0, 0))
            total[rank] = Lag(before.last + lag.last, before.waited_us + lag.waited_us)
