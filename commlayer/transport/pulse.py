"""`Pulse`: which processes of a job live, also while they belong to no group.

On this host the kernel tells the end of a process. Of other hosts, each process writes a number into the Store that
grows; one that stands still for the peer timeout is taken for dead. Processes have the numbers that the caller gives.

Each process watches one of another host all the time, and tells the others through the Store when that one falls
silent. So they know it when their own timeout ends: who only begins to look then needs as long again.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from .store_link import connection

BEAT_S = 0.25
"""Seconds between two beats of a process."""


class Pulse:
    """The processes `places`, by number: each one's host key and process id. `own` is this one.

    With processes on other hosts, and after `beat`, a thread beats over a connection of its own: a call that waits
    keeps others from one.
    """

    def __init__(self, store: Any, own: int, places: Mapping[int, tuple[str, int]], timeout_s: float) -> None:
        self._store = store
        self._own = own
        self._timeout_s = timeout_s
        self._descriptors: dict[int, int] = {}
        self._ended: set[int] = set()
        self._beats: dict[int, tuple[str, float]] = {}
        self._distant: set[int] = set()
        self._here: set[int] = set()
        """Those of this host that must beat."""
        self._watched: dict[int, tuple[str, float]] = {}
        self._host = places[own][0]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-pulse", daemon=True)
        for number, place in places.items():
            self.add(number, place)

    def add(self, number: int, place: tuple[str, int], *, beats: bool = False) -> None:
        """Watches another process. Does nothing for one that it knows. `beats`: also one of this host must beat, until
        `trust`."""
        host, process = place
        if number in {self._own, *self._ended, *self._descriptors, *self._distant}:
            return
        if host != self._host:
            self._distant.add(number)
            self.beat()
            return
        if beats:
            self._distant.add(number)
            self._here.add(number)
        try:
            self._descriptors[number] = os.pidfd_open(process)
        except ProcessLookupError:
            self._ended.add(number)

    def beat(self) -> None:
        """From now on this process beats, for those on other hosts. Idempotent."""
        if not self._thread.is_alive() and not self._stopped.is_set():
            self._thread.start()

    def trust(self) -> None:
        """Processes of this host need not beat any more: they may be stopped by a debugger."""
        self._distant -= self._here
        self._here.clear()

    def forget(self, numbers: Collection[int]) -> None:
        """Watches them no more."""
        self._distant -= set(numbers)
        self._here -= set(numbers)
        for number in set(numbers) & set(self._descriptors):
            os.close(self._descriptors.pop(number))

    def dead(self, watched: Collection[int]) -> set[int]:
        """Those of `watched` that have ended, or must beat and have not done so for the timeout. It is counted from the
        first call for them, or by the process that watches them."""
        poll = select.poll()
        for descriptor in self._descriptors.values():
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        self._ended |= {number for number, descriptor in self._descriptors.items() if descriptor in ready}
        return {rank for rank in watched if rank in self._ended or (rank in self._distant and self._is_silent(rank))}

    def _is_silent(self, number: int) -> bool:
        beat = _read(self._store, str(number))
        told = beat != "" and _read(self._store, f"silent {number}") == beat
        return told or self._stands_still(self._beats, number, beat)

    def _stands_still(self, beats: dict[int, tuple[str, float]], number: int, beat: str) -> bool:
        last, since_s = beats.get(number, (None, 0.0))
        if last != beat:
            beats[number] = beat, time.monotonic()
            return False
        return time.monotonic() - since_s > self._timeout_s

    def _watch(self, store: Any) -> None:
        """Looks at one process that must beat: the next one by number, after as many as this host has, that is not
        known to be silent."""
        here = [self._own, *self._descriptors, *self._ended]
        order = sorted([*here, *self._distant])
        place = order.index(self._own) + len(here)
        for number in [*order[place % len(order) :], *order[: place % len(order)]]:
            if number in self._distant:
                beat = _read(store, str(number))
                if not beat or not self._stands_still(self._watched, number, beat):
                    return
                store.set(f"silent {number}", beat)

    def close(self) -> None:
        """Ends the thread, and frees the descriptors. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the Store is gone
            count, store = 0, connection(self._store, self._timeout_s)
            while not self._stopped.wait(BEAT_S):
                count += 1
                store.set(str(self._own), str(count))
                self._watch(store)


def _read(store: Any, key: str) -> str:
    """Its value in the Store; empty: there is none."""
    return store.get(key).decode() if store.check([key]) else ""
