"""`Vote`: the threads of a site act on behalf of their loops together, or not at all.

A loop that is in time must not wait for that. So the threads ask each other only while they find their own loops late,
through the Store. Once all have said so, each keeps its loop out of `step()` for a moment, and says that. When all do,
they act. A loop that was faster than that makes it fail, and its site is not late.

All loops must have made equally many steps. Else one of them is about to make the step that another one has made, and
waits there for that one, which waits for it in a collective of DDP or FSDP2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...errors import CommError

HOLD_S = 0.1
"""How long a thread keeps its loop out of `step()` for the others of its site, at least."""

HOLD_ANSWERS = 8
"""And as long as so many answers of the Store take: the others may need two to come, and the one that asks five."""

HOLD_MOST_S = 2.0
"""At most: an answer may be late by chance."""

PAUSE_S = 0.002

YES, NO, NEVER = "yes", "no", "never"
"""All act; not now: a loop was faster; they must not."""


class Vote:
    """The vote of one rank of a site. `site`: a number of the site; `place` of `size` is this rank's."""

    def __init__(self, site: int, place: int, size: int) -> None:
        self._site, self._place, self._size = site, place, size
        self._action, self._attempt, self._is_told = "", 0, False

    def on(self, store: Any, action: str, steps: int, may: Callable[[], bool]) -> str:
        """How the vote on an action ends, which all ranks of the site act on at most once: `YES`, `NO` or `NEVER`. The
        caller keeps its loop out of `step()`, which has made so many `steps`. `may`: whether they must act; asked on
        one rank, always the same, once all keep theirs, and again after a `NO`. Raises CommError if the Store fails
        then: the others may act."""
        if action != self._action:
            self._action, self._attempt, self._is_told = action, 0, False
        name = f"site {self._site} {action} {self._attempt}"
        hold_s = self._asked_s(store, f"{name} late")
        if hold_s is None:
            return NO
        try:
            found = self._held(store, name, steps, hold_s, may)
        except RuntimeError as error:
            raise CommError(
                f"LocalSteps: the Store has failed while the ranks of this site decided on {action!r}, so the others "
                f"may have acted without place {self._place}: look at the process that serves it. ({error})"
            ) from error
        if found == NO:
            self._attempt, self._is_told = self._attempt + 1, False
        return found

    def _asked_s(self, store: Any, name: str) -> float | None:
        """How long this rank keeps its loop, if all find theirs late. None: not all, or there is no Store, as the bell
        will notice."""
        try:
            if not self._is_told:
                store.set(f"{name} {self._place}", "")
                self._is_told = True
            asked_s = time.monotonic()
            are_late = self._all(store, name)
            answer_s = time.monotonic() - asked_s
        except RuntimeError:
            return None
        return min(max(HOLD_S, HOLD_ANSWERS * answer_s), HOLD_MOST_S) if are_late else None

    def _held(self, store: Any, name: str, steps: int, hold_s: float, may: Callable[[], bool]) -> str:
        """The verdict, once this rank keeps its loop."""
        verdict = f"{name} verdict"
        store.set(f"{name} holds {self._place}", str(steps))
        end_s = time.monotonic() + hold_s
        while not store.check([verdict]):
            if self._place == 0 and self._all(store, f"{name} holds"):
                made = set(store.multi_get([f"{name} holds {place}" for place in range(self._size)]))
                store.compare_set(verdict, "", NO if len(made) > 1 else YES if may() else NEVER)
            elif time.monotonic() > end_s:
                store.compare_set(verdict, "", NO)
            else:
                time.sleep(PAUSE_S)
        return str(store.get(verdict).decode())

    def _all(self, store: Any, name: str) -> bool:
        return bool(store.check([f"{name} {place}" for place in range(self._size)]))
