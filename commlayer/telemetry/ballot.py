"""`Ballot`: one change of `commlayer ctl` on its way through the ranks, as rank 0's collector follows it.

A change is offered to all ranks. If one cannot make it, all drop it. Otherwise all ranks make it at one step
(`frontend.gradients.changes`), and each reports that step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from .control import Change


@dataclasses.dataclass
class Ballot:
    """One change. `asker`: the connection to answer. `ranks`: all ranks of the job."""

    change: Change
    asker: bytes
    ranks: frozenset[int]
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    accepted: set[int] = dataclasses.field(default_factory=set)
    refusals: dict[int, str] = dataclasses.field(default_factory=dict)
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    """The step before which each rank has applied it."""

    def answer(self, rank: int, refusal: str) -> None:
        """A rank can make the change, or cannot for a reason."""
        if refusal:
            self.refusals[rank] = refusal
        else:
            self.accepted.add(rank)

    def result(self) -> dict[str, Any] | None:
        """The answer for the asker; None: it is still open. `applied` tells whether the ranks have made the change."""
        if self.refusals:
            rank = min(self.refusals)
            more = f" ({len(self.refusals)} ranks refuse)" if len(self.refusals) > 1 else ""
            return {"applied": False, "error": f"rank {rank}: {self.refusals[rank]}{more}"}
        if self.steps.keys() >= self.ranks:
            return {"applied": True, "steps": sorted(set(self.steps.values())), "ranks": len(self.ranks)}
        if self.clock() < self.deadline_s:
            return None
        if self.steps:
            left = _names(self.ranks - self.steps.keys())
            return {"applied": False, "error": f"{left} did not report it in time; the other ranks have applied it"}
        if self.accepted < self.ranks:
            left = _names(self.ranks - self.accepted)
            return {"applied": False, "error": f"{left} did not answer in time; the change is dropped"}
        error = (
            "no rank has made a step with it in time; the change is dropped, unless the ranks have just agreed on it"
        )
        return {"applied": False, "error": f"{error}: commlayer top shows the settings in use"}


def _names(ranks: Iterable[int]) -> str:
    named = sorted(ranks)
    more = f" and {len(named) - 8} more" if len(named) > 8 else ""
    return f"rank {', '.join(map(str, named[:8]))}{more}"
