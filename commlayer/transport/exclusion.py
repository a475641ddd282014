"""`Exclusion`: the ranks of a group that stay agree on those that go, before any of them makes the smaller group."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection

from ..errors import CommError, MismatchError, PeerLostError
from .accord import Accord, Verdict, store_errors
from .base import Store
from .members import Members

FAREWELL_S = 1.0
"""Patience of an error with the Store: one whose process is frozen answers no call."""

CALL = "shrink_group"

GONE = "gone"
"""The key of the ranks on whose exclusion the others have agreed."""


class Exclusion:
    """The attempts of one group, in a part of the Store of their own.

    `lost` returns the ranks of the group that are known to be dead.
    """

    def __init__(self, store: Store, members: Members, lost: Callable[[], Collection[int]]) -> None:
        self._store = store
        self._members = members
        self._lost = lost
        self._attempts = 0

    def agree(self, excluded: Collection[int], *, aborts: bool, timeout_s: float) -> int:
        """Returns once all ranks but the `excluded` ones of the group have called this with the same arguments: the
        number of their attempt, the same on all. A rank's own calls may be fewer: it may have missed an attempt.

        An error is the same on all ranks that have called, and leaves the group as it was: MismatchError for other
        arguments on another rank, and on a rank that the others exclude; PeerLostError for a rank that should stay and
        is dead; OperationTimeoutError for one that does not come within `timeout_s`; CommError without a Store.
        """
        with store_errors(lambda text: self._error(CommError, text, None)):
            number, verdict = self._settled(sorted(excluded), aborts=aborts, timeout_s=timeout_s)
            if verdict.kind is not None:
                raise self._error(verdict.kind, verdict.text, verdict.culprit)
            gone: list[int] = json.loads(verdict.agreed)[0]
            self._store.set(GONE, json.dumps(gone))
        if self._members.rank in gone:
            raise self._error(MismatchError, self._told(gone), None)
        return number

    def farewell(self) -> str:
        """That the others have gone on without this rank, for its errors; empty: they have not, or nobody knows."""
        found: list[str] = []

        def look() -> None:
            with contextlib.suppress(RuntimeError, ValueError):  # the Store is gone; it left half an answer
                if self._store.check([GONE]):
                    excluded = json.loads(self._store.get(GONE))
                    if self._members.rank in excluded:
                        found.append(self._told(excluded))

        thread = threading.Thread(target=look, name="commlayer-exclusion", daemon=True)
        thread.start()
        thread.join(FAREWELL_S)
        return found[0] if found else ""

    def _settled(self, excluded: list[int], *, aborts: bool, timeout_s: float) -> tuple[int, Verdict]:
        """The next attempt, and its verdict."""
        while self._store.check([f"{self._attempts}/verdict", f"{self._attempts + 1}/proposal"]):
            self._attempts += 1  # the others are at a later one: they did not ask this rank before
        number, rank = self._attempts, self._members.rank
        self._attempts += 1
        staying = [place for place in range(len(self._members.ranks)) if place not in excluded]

        def differ(first: int, proposed: str) -> str:
            told = "; ".join(
                f"{self._members.name(who)} excludes {self._members.names(ranks)} with "
                f"{'SHRINK_ABORT' if is_abort else 'SHRINK_DEFAULT'}"
                for who, (ranks, is_abort) in ((first, json.loads(proposed)), (rank, (excluded, aborts)))
            )
            return f"{told}; pass the same ranks and the same flags on all ranks that stay"

        def obstacle() -> Verdict | None:
            dead = [place for place in self._lost() if place in staying]
            told = f"{self._members.names(dead)} should stay, and died; exclude them, too"
            return Verdict.against(PeerLostError, told, dead[0]) if dead else None

        def late(absent: Collection[int]) -> str:
            remedy = "look at their logs and stacks, or exclude them, too"
            return f"{self._members.names(absent)} did not call it within {timeout_s:g} s; {remedy}"

        accord = Accord(self._store, f"{number}/", rank, staying)
        return number, accord.settle(json.dumps([excluded, aborts]), differ, obstacle, late, timeout_s)

    def _told(self, excluded: Collection[int]) -> str:
        staying = [rank for rank in range(len(self._members.ranks)) if rank not in excluded]
        return f"{self._members.names(staying)} have excluded this rank and gone on without it (dist.{CALL})"

    def _error(self, kind: type[CommError], text: str, culprit: int | None) -> CommError:
        error = kind(f"{self._members.who}: {CALL}: {text}")
        error.rank, error.operation = self._members.ranks[self._members.rank], CALL
        error.group = self._members.group
        if culprit is not None:
            error.culprit = self._members.ranks[culprit]
            error.host = self._members.hosts.get(error.culprit)
        return error
