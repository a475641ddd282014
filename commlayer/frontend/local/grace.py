"""`Grace`: how long the other sites wait for a late loop before it is left out of a sync. Pure numbers."""

from __future__ import annotations

import statistics
from collections import deque

TURNS = 32
"""The latest turns that count."""

TURNS_LEAST = 8
"""So many turns must be known: before, a site is never left out. The first steps are often the longest."""

SHARE = 0.75
"""The usual lateness is one that this part of the turns has not exceeded: rare stalls do not count as usual."""

TIMES = 4
"""So many times the usual lateness. Of times that are spread as those of independent events (exponentially), one in 250
is longer."""

STEPS = 2
"""Usual steps on top: a site may be a step behind without a stall, as after a step that a GradScaler has skipped."""

SECONDS_LEAST = 0.25
"""The least grace: on a shared machine, a process may wait so long for a core."""


class Grace:
    """That of one site. It learns from the turns that its loop has begun, and from the steps between them."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=TURNS)
        self._step_s: deque[float] = deque(maxlen=TURNS)
        self.left_s = 0.0
        """When the latest step ended."""

    def came(self, now_s: float) -> None:
        """A step begins: that of `optimizer.step()`."""
        if self.left_s:
            self._step_s.append(now_s - self.left_s)

    def left(self, now_s: float) -> None:
        """The step has ended: the loop computes the next one."""
        self.left_s = now_s

    def began(self, late_s: float) -> None:
        """The loop has begun a turn so long after the first site."""
        self._late_s.append(late_s)

    @property
    def seconds(self) -> float | None:
        """The grace; None: too little is known."""
        if len(self._late_s) < TURNS_LEAST or not self._step_s:
            return None
        usual_s = sorted(self._late_s)[min(int(SHARE * len(self._late_s)), len(self._late_s) - 1)]
        return max(TIMES * usual_s + STEPS * statistics.median(self._step_s), SECONDS_LEAST)
