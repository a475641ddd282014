"""`Record`: the measured steps of one rank, as a file of JSON lines in the folder of the trial."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .spec import Phase


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank."""

    phase: Phase
    seconds: float
    """The time from the end of the optimizer's step before it to the end of its own."""
    collectives: int = 0
    """Operations that were called. 0 where nothing counts them: jobs without commlayer, in a plain trial."""
    nbytes: int = 0
    """Bytes of the inputs of these operations."""
    in_flight_s: float = 0.0
    """Time in which at least one of them was in flight (on commlayer only)."""
    waited_s: float = 0.0
    """Time that each of them waited for the first data of the last rank, added up (on commlayer only)."""


@dataclass(frozen=True)
class Record:
    """The measured steps of one rank."""

    rank: int
    steps: tuple[Step, ...]
    world: int = 1
    host: str = ""
    backend: str = ""
    """The job's default group, as torch names it; empty without one."""
    uses_engine: bool = False
    """Whether an engine of commlayer carried operations."""
    takes_hook: bool = False
    """Whether it has a DistributedDataParallel that the settings of `[ddp]` reach: the script gives it no hook."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """The counters of `commlayer.stats()`: their growth over the measured steps."""
    lags_s: Mapping[int, float] = field(default_factory=dict)
    """Time that this rank waited for each other rank, over the measured steps."""
    paths: tuple[Mapping[str, Any], ...] = ()
    """`commlayer.paths()` at the end."""
    tcp: Mapping[str, int] = field(default_factory=dict)
    """The host's counts of TCP segments over the measured steps: `sent` and `resent`."""
    is_complete: bool = False
    """Whether the rank made all steps."""

    @property
    def step_s(self) -> tuple[float, ...]:
        """The times of the steps."""
        return tuple(step.seconds for step in self.steps)

    def end_line(self) -> str:
        """The last line of the file: all but the steps."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in ("steps", "is_complete"))
        return json.dumps({"end": {name: getattr(self, name) for name in names}})

    @classmethod
    def parse(cls, rank: int, text: str) -> Record:
        """The record in the text of a file, which a killed rank may have left unfinished."""
        steps, end = [], None
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if "end" in entry:
                end = entry["end"]
            else:
                steps.append(Step(**entry))
        if end is None:
            return cls(rank, tuple(steps))
        end["lags_s"] = {int(other): lag for other, lag in end["lags_s"].items()}
        end["paths"] = tuple(end["paths"])
        return cls(**end, steps=tuple(steps), is_complete=True)


def line(step: Step) -> str:
    """The line of a step."""
    return json.dumps(dataclasses.asdict(step))


def path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank}.jsonl"


def read(folder: Path) -> tuple[Record, ...]:
    """The records in a folder, in the order of the ranks."""
    found = sorted((int(file.stem.removeprefix("rank-")), file) for file in folder.glob("rank-*.jsonl"))
    return tuple(Record.parse(rank, file.read_text(encoding="utf-8")) for rank, file in found)


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """The time that at least one of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))  # 0 of an empty one
        reached = max(reached, end)
    return total
