"""`Attendance`: the monitored barrier of a group, which names the ranks that do not come.

It runs through the Store: a failure closes no connection and leaves the group as it was.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence

from ..errors import OperationTimeoutError
from .base import Store
from .members import Members

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05
PAUSE_PER_RANK_S = 1e-4
"""The longest pause in large groups: together, the ranks ask the Store 10,000 times a second."""
SLACK_S = 1.0
"""Seconds after the timeout in which the Store may still answer."""


class Attendance:
    """The monitored barriers of one group, in a part of the Store of their own. All ranks call `barrier` as often."""

    def __init__(self, store: Store, members: Members) -> None:
        self._store = store
        self._members = members
        self._rank = members.rank
        self._size = len(members.ranks)
        self._barriers = 0
        self._lock = threading.Lock()

    def barrier(self, timeout_s: float, *, all_ranks: bool = False) -> None:
        """Waits until all ranks have come. Operations of the group may hang meanwhile, and go on afterwards.

        Raises OperationTimeoutError, which names all missing ranks; the culprit is the first of them. Without an answer
        of the Store no rank is the culprit. The text ends with gloo's own words, of all ranks or of the first, because
        tools search for them.
        """
        missing = self.missing(timeout_s)
        if missing == []:
            return
        if missing is None:
            told = (
                f"the job's Store does not answer; look at the log of the process that serves it, rank 0 of the job or "
                f"torchrun's agent ({self._as_gloo([self._rank], all_ranks=all_ranks)})"
            )
        else:
            told = (
                f"{self._members.names(missing)} did not call it within {timeout_s:g} s; look at their logs and stacks "
                f"({self._as_gloo(missing, all_ranks=all_ranks)})"
            )
        error = OperationTimeoutError(f"{self._members.who}: monitored_barrier: {told}")
        error.rank, error.operation = self._members.ranks[self._rank], "monitored_barrier"
        error.group = self._members.group
        if missing:
            error.culprit = self._members.ranks[missing[0]]
            error.host = self._members.hosts.get(error.culprit)
        raise error

    def _as_gloo(self, missing: Sequence[int], *, all_ranks: bool) -> str:
        """The text of torch's ProcessGroupGloo, with ranks of the group."""
        if self._rank != 0:
            return (
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0"
            )
        if all_ranks:
            return f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier"
        return f"Rank {missing[0]} failed to pass monitoredBarrier; Rank 0 timed out in monitoredBarrier"

    def missing(self, timeout_s: float) -> list[int] | None:
        """Waits until all ranks have come; returns the ranks of the group that have not. On all ranks they are those
        that rank 0 found; without rank 0, those that this rank finds. None: the Store does not answer."""
        found: list[list[int]] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # the Store is gone
                found.append(self._meet(timeout_s))

        with self._lock:
            # The thread is for a Store whose process is frozen: it answers no call.
            thread = threading.Thread(target=run, name="commlayer-attendance", daemon=True)
            thread.start()
            thread.join(timeout_s + 2 * SLACK_S)
            self._barriers += 1
        return found[0] if found else None

    def _meet(self, timeout_s: float) -> list[int]:
        number = self._barriers
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        verdict = f"{number}/missing"
        self._store.set(keys[self._rank], "")
        awaited = keys if self._rank == 0 else [verdict]
        if not self._await(awaited, timeout_s) and self._rank != 0:
            absent = self._absent(keys)
            # Rank 0 may have deleted the keys just now: then its verdict is there. All are there: it is on its way.
            if not self._await(awaited, 0.0 if absent else SLACK_S):
                return absent or [0]
        if self._rank != 0:
            found: list[int] = json.loads(self._store.get(verdict))
            return found
        absent = self._absent(keys)
        self._store.set(verdict, json.dumps(absent))
        if not absent:  # every rank is in this barrier, so it has left the one before
            for key in [*keys, f"{number - 1}/missing"] if number else keys:
                self._store.delete_key(key)
        return absent

    def _await(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether the keys come in time. It polls: a waiting call would keep other threads from the Store."""
        end, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while not self._store.check(list(keys)):
            if time.monotonic() >= end:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max(LONGEST_PAUSE_S, PAUSE_PER_RANK_S * self._size))
        return True

    def _absent(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
