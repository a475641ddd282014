"""`Vote`: the threads of a site act on behalf of their loops together, or not at all.

A loop that is in time must not wait for that. So the threads ask each other only while they find their own loops late,
through the Store. Once all have said so, each keeps its loop out of `step()` for a moment, and says that. When all do,
they act. A loop that was faster than that makes it fail, and its site is not late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

HOLD_S = 0.1
"""How long a thread keeps its loop out of `step()` for the others of its site, and several answers of the Store."""

PAUSE_S = 0.002

YES, NO, NEVER = "yes", "no", "never"
"""All act; not now: a loop was faster; they must not."""


class Vote:
    """The vote of one rank of a site. `site`: a number of the site; `place` of `size` is this rank's."""

    def __init__(self, site: int, place: int, size: int) -> None:
        self._site, self._place, self._size = site, place, size
        self._action, self._attempt, self._is_told = "", 0, False

    def on(self, store: Any, action: str, may: Callable[[], bool]) -> str:
        """How the vote on an action ends, which all ranks of the site act on at most once: `YES`, `NO` or `NEVER`. The
        caller keeps its loop out of `step()`. `may`: asked on one rank, once all keep theirs: whether they must act.
        Raises RuntimeError without a Store."""
        if action != self._action:
            self._action, self._attempt, self._is_told = action, 0, False
        name = f"site {self._site} {action} {self._attempt}"
        verdict = f"{name} verdict"
        if not self._is_told:
            store.set(f"{name} late {self._place}", "")
            self._is_told = True
        if not self._all(store, f"{name} late"):
            return NO
        store.set(f"{name} holds {self._place}", "")
        end_s = time.monotonic() + HOLD_S
        while not store.check([verdict]):
            if self._place == 0 and self._all(store, f"{name} holds"):
                store.compare_set(verdict, "", YES if may() else NEVER)
            elif time.monotonic() > end_s:
                store.compare_set(verdict, "", NO)
            else:
                time.sleep(PAUSE_S)
        found = str(store.get(verdict).decode())
        if found == NO:
            self._attempt, self._is_told = self._attempt + 1, False
        return found

    def _all(self, store: Any, name: str) -> bool:
        return bool(store.check([f"{name} {place}" for place in range(self._size)]))
