"""`Tally`: the steps and samples of a site since the last sync of each fragment in which it counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = ("since", "counts")
"""The names in a saved state."""


class Tally:
    """Nothing at first."""

    def __init__(self, fragments: int) -> None:
        self.steps = [0] * fragments
        """Local steps since then, by fragment."""
        self._samples = [0.0] * fragments

    def add(self, samples: float) -> None:
        """A local step, with so many samples."""
        for at in range(len(self.steps)):
            self.steps[at] += 1
            self._samples[at] += samples

    def take(self, at: int) -> tuple[int, float]:
        """Steps and samples that a sync of this fragment has, which begins now. What its codec has left of an earlier
        one has no weight of its own: without new steps, it would take that from the steps of other sites."""
        found = self.steps[at], self._samples[at]
        self.steps[at], self._samples[at] = 0, 0.0
        return found

    def state(self) -> dict[str, Any]:
        """A copy of all."""
        return {"since": list(self.steps), "counts": list(self._samples)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a copy of the value of `state`."""
        self.steps, self._samples = (list(state[name]) for name in FIELDS)
