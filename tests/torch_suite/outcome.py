"""How one test of torch ended, and what the outcomes of two backends say beside each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One test in one world on one backend."""

    gate: str
    backend: str
    world: int
    test: str
    outcome: str
    """passed, failed or skipped."""
    detail: str
    """Why it failed or was skipped."""
    seconds: float

    @property
    def key(self) -> tuple[str, int, str]:
        """What the same test has in common on all backends."""
        return self.gate, self.world, self.test
