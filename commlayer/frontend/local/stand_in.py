"""`StandIn`: takes part in syncs on behalf of a loop that is late, so that the other sites need not wait for it. A site
of several ranks is late when all their loops are, at the same step: the ranks vote on that.

The process of the site is alive: only its loop does not come to `step()`, as its data or its disk are slow. After a
grace the thread of the bell begins the sync. The site counts nothing in it, and its change stays in its weights. The
thread touches none of the model's tensors: the loop applies what has come at its next step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .bell import Bell
from .grace import Grace
from .vote import NEVER, YES, Vote

if TYPE_CHECKING:
    from .rounds import Rounds

log = logging.getLogger("commlayer")


class StandIn:
    """That of the loop of `rounds`. At least `quorum` sites count in each sync. One lock decides whether the loop or
    the thread begins or ends one. `vote`: of the ranks of the site; None: it has one."""

    def __init__(self, rounds: Rounds, quorum: int, vote: Vote | None) -> None:
        self._rounds, self._quorum, self._vote = rounds, quorum, vote
        self._lock = threading.RLock()
        self._is_loop = False  # whether the loop has the lock
        self.grace = Grace()
        self.syncs = 0
        """Those that were begun on behalf of the loop."""
        self._is_acting = False  # since the loop's latest step
        self._refused = -1  # the latest turn in which too many other sites are late
        self._claimed = -1, 0  # the latest turn for which this rank has asked, and which site of that turn it was
        self._all_leave = False  # all other sites but those that are late
        self._failure: BaseException | None = None

    def __str__(self) -> str:
        grace_s = self.grace.seconds
        known = "a grace that is not known yet" if grace_s is None else f"a grace of {grace_s:.2f} s"
        return f"this site was left out of {self.syncs} syncs, after {known}; at least {self._quorum} count in each"

    @contextlib.contextmanager
    def loop(self, *, is_step: bool = False, is_state: bool = False) -> Iterator[None]:
        """A context in which the loop begins and ends syncs; `is_state`: it only looks. Raises the error that the
        thread has found, and ConfigError within itself."""
        with self._lock:
            if self._is_loop:
                raise ConfigError(
                    "LocalSteps: a signal handler has called state_dict() while a step was made; call it between steps"
                )
            if self._failure is not None:
                raise self._failure
            self._is_loop = True
            try:
                if not is_state:
                    self._is_acting = self._all_leave = False
                if is_step:
                    self.grace.came(time.monotonic())
                yield
                if is_step:
                    self.grace.left(time.monotonic())
            finally:
                self._is_loop = False

    def look(self, bell: Bell, store: Any) -> None:
        """Acts, if the loop is late. For the thread of the bell, with its connection to the Store."""
        if self._failure is not None or not self._lock.acquire(blocking=False):
            return  # the loop is in `step()`
        try:
            grace_s, away_s = self.grace.seconds, time.monotonic() - self.grace.left_s
            if grace_s is not None and away_s < self._rounds.timeout_s:  # else it hangs, and the others shall find it
                self._act(bell, store, 0.0 if self._is_acting else grace_s, away_s)
        except BaseException as error:
            self._failure = error  # the loop raises it
        finally:
            self._lock.release()

    def _act(self, bell: Bell, store: Any, patience_s: float, away_s: float) -> None:
        """The others may need a sync that this site has begun: after a death, and before a site joins. They come to
        that when they apply it, up to a turn later, and the loop waits while this thread does."""
        rounds, turn = self._rounds, self._rounds.syncs
        is_late = bell.rung(turn) and bell.late_s(turn) >= patience_s
        is_wanted = rounds.has_ended and (is_late or (away_s >= patience_s and rounds.is_awaited))
        if is_wanted and self._is_carried(store, f"end {turn}", lambda: True):
            heads = rounds.conclude(is_loop=False)
            is_end = all(head.is_leaving or head.is_late for head in heads)
            self._all_leave = is_end and any(head.is_leaving for head in heads)
        if is_late and not rounds.is_flying and not self._all_leave and rounds.may_keep and self._granted(store, turn):
            if not self._is_acting:
                log.warning(
                    "LocalSteps: the loop of this site is late by %.2f s: it counts nothing from sync %d on, until it "
                    "makes its next step",
                    bell.late_s(turn),
                    turn,
                )
            rounds.start_late()
            self.syncs, self._is_acting = self.syncs + 1, True

    def _granted(self, store: Any, turn: int) -> bool:
        """Whether this site is late as a whole, and enough other sites count in this sync: the first that ask are those
        that may be left out."""
        most = self._rounds.sites - self._quorum
        if most < 1 or self._refused == turn:
            return False

        def may() -> bool:
            if self._claimed[0] != turn:  # else a vote has failed since, and the site has its place already
                self._claimed = turn, store.add(f"late {turn}", 1)
            return self._claimed[1] <= most

        return self._is_carried(store, f"begin {turn}", may)

    def _is_carried(self, store: Any, action: str, may: Callable[[], bool]) -> bool:
        """Whether the threads of all ranks of this site do this now. `may`: asked on one of them."""
        if self._vote is not None:
            found = self._vote.on(store, action, self._rounds.steps, may)
        else:
            try:
                found = YES if may() else NEVER
            except RuntimeError:  # the Store is gone, as the bell will notice
                return False
        if found == NEVER:
            self._refused = self._rounds.syncs
        return found == YES
