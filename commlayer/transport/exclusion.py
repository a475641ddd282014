"""`Exclusion`: the ranks of a group that stay agree on the ranks that go, before any of them makes the smaller group.

They do so through the Store: the first rank to call proposes its ranks, and each other one compares its own with them.
Whoever finds out first how the attempt ends, well or not, says so in one key that is written once, the verdict. All
ranks obey that, so no rank goes on alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator

from ..errors import CommError, MismatchError, OperationTimeoutError, PeerLostError
from .base import Store
from .members import Members

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.02
"""Pauses between looks at the Store. A call that waits there would keep other threads from it."""

FAREWELL_S = 1.0
"""Patience of an error with the Store: one whose process is frozen answers no call."""

CALL = "shrink_group"

GONE = "gone"
"""The key of the ranks on whose exclusion the others have agreed."""

_KINDS: dict[str, type[CommError]] = {
    kind.__name__: kind for kind in (MismatchError, OperationTimeoutError, PeerLostError)
}


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """How an attempt has ended. Ranks are ranks of the group."""

    excluded: list[int]
    """The ranks that go, if the others agree."""
    kind: str = ""
    """The name of the error that all ranks raise; empty: they agree."""
    text: str = ""
    culprit: int | None = None


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
        with self._store_errors():
            number, verdict = self._settled(sorted(excluded), aborts=aborts, timeout_s=timeout_s)
        if verdict.kind:
            raise self._error(_KINDS[verdict.kind], verdict.text, verdict.culprit)
        if self._members.rank in verdict.excluded:
            raise self._error(MismatchError, self._told(verdict.excluded), None)
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

    def _settled(self, excluded: list[int], *, aborts: bool, timeout_s: float) -> tuple[int, _Verdict]:
        """The next attempt, and its verdict, which this rank helps to find."""
        while self._store.check([f"{self._attempts}/verdict", f"{self._attempts + 1}/proposal"]):
            self._attempts += 1  # the others are at a later one: they did not ask this rank before
        number, rank = self._attempts, self._members.rank
        self._attempts += 1
        staying = [place for place in range(len(self._members.ranks)) if place not in excluded]
        self._store.set(f"{number}/{rank}", "")
        own = json.dumps([excluded, aborts])
        first, _, proposed = self._store.compare_set(f"{number}/proposal", "", f"{rank} {own}").decode().partition(" ")
        if proposed != own:
            told = "; ".join(
                f"{self._members.name(who)} excludes {self._members.names(ranks)} with "
                f"{'SHRINK_ABORT' if is_abort else 'SHRINK_DEFAULT'}"
                for who, (ranks, is_abort) in ((int(first), json.loads(proposed)), (rank, (excluded, aborts)))
            )
            remedy = "pass the same ranks and the same flags on all ranks that stay"
            self._propose(number, _Verdict([], "MismatchError", f"{told}; {remedy}", rank))
        elif self._store.add(f"{number}/count", 1) == len(staying):
            self._propose(number, _Verdict(excluded))
        return number, self._await(number, staying, timeout_s)

    def _await(self, number: int, staying: list[int], timeout_s: float) -> _Verdict:
        end, pause_s, key = time.monotonic() + timeout_s, FIRST_PAUSE_S, f"{number}/verdict"
        while not self._store.check([key]):
            dead = [rank for rank in self._lost() if rank in staying]
            if dead:
                told = f"{self._members.names(dead)} should stay, and died"
                self._propose(number, _Verdict([], "PeerLostError", f"{told}; exclude them, too", dead[0]))
            elif time.monotonic() >= end:
                absent = [rank for rank in staying if not self._store.check([f"{number}/{rank}"])]
                told = f"{self._members.names(absent)} did not call it within {timeout_s:g} s"
                remedy = "look at their logs and stacks, or exclude them, too"
                culprit = absent[0] if absent else None
                self._propose(number, _Verdict([], "OperationTimeoutError", f"{told}; {remedy}", culprit))
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        verdict = _Verdict(**json.loads(self._store.get(key)))
        if not verdict.kind:
            self._store.set(GONE, json.dumps(verdict.excluded))
        return verdict

    def _propose(self, number: int, verdict: _Verdict) -> None:
        """Makes this the verdict, unless there is one."""
        self._store.compare_set(f"{number}/verdict", "", json.dumps(dataclasses.asdict(verdict)))

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

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._error(
                CommError,
                f"the job's Store does not answer: the process that serves it (rank 0, or torchrun's agent) is gone, "
                f"or the network to its host; look at its log, and restart the job. ({error})",
                None,
            ) from error
