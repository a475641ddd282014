"""`StepCounts`: how many steps each optimizer, or communication hook, has made."""

from __future__ import annotations

import itertools
import weakref


class StepCounts:
    """Not safe for threads. A source that was freed leaves nothing to one that gets its memory."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._counts: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()

    def add(self, source: object) -> tuple[int, int]:
        """Counts a step. Returns the number of its source, which no other one gets, and the count."""
        number, count = self._counts.get(source) or (next(self._numbers), 0)
        self._counts[source] = number, count + 1
        return number, count + 1
