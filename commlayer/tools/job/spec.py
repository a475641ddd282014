"""`Spec`: the steps of a trial, as the starter writes them for the ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Phase = Literal["real", "short", "none"]
"""The communication of a step: as the job asks for it; with messages of a few bytes; left out."""

_NAME = "trial.json"


def real(steps: int) -> tuple[Phase, ...]:
    """The phases of steps whose communication is all real."""
    return tuple("real" for _ in range(steps))


@dataclass(frozen=True)
class Spec:
    """The steps of a trial. The first one of a process includes its start, so `warmup` is at least 1."""

    warmup: int
    """Steps before the measured ones; their communication is real."""
    phases: tuple[Phase, ...]
    """The phase of each measured step."""
    timeout_s: float
    """Longest time that a rank waits for the others at the end."""

    def __post_init__(self) -> None:
        if self.warmup < 1:
            raise ValueError(f"warmup {self.warmup}: use at least 1, the first step of a job takes longer")
        if not self.phases:
            raise ValueError("steps 0: use at least 1")

    @property
    def steps(self) -> int:
        """All optimizer steps of the job."""
        return self.warmup + len(self.phases)

    @property
    def is_real(self) -> bool:
        """Whether all communication is real."""
        return set(self.phases) == {"real"}

    def phase(self, done: int) -> Phase:
        """The phase of the step that follows `done` ones."""
        return "real" if done < self.warmup else self.phases[min(done - self.warmup, len(self.phases) - 1)]

    def write(self, folder: Path) -> None:
        """Leaves it for the ranks."""
        table = {"warmup": self.warmup, "phases": self.phases, "timeout_s": self.timeout_s}
        (folder / _NAME).write_text(json.dumps(table), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Spec:
        """Inverse of `write`."""
        table = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        return cls(table["warmup"], tuple(table["phases"]), table["timeout_s"])
