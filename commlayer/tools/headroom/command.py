"""`commlayer headroom`: runs the trials of a job and reports."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..job.spec import Phase, real
from ..job.trial import Trial, TrialError, run_trial
from ..json_output import check, deliver
from .split import Split, split
from .timing import Timing
from .verdict import LEAST, is_little, next_command, verdict

EXIT_LITTLE, EXIT_MUCH = 0, 3
VERSION = 1
"""The version of the JSON's form."""

ON_ENGINE = {"COMMLAYER_INSTEAD_OF": "gloo"}
WITHOUT_ENGINE = {"COMMLAYER_DISABLE": "1"}
_TELL_S = 3.0

Note = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    command: Sequence[str]
    steps: int = 4
    """Measured steps in a row with the same communication."""
    rounds: int = 3
    """How often the kinds of communication take turns."""
    warmup: int = 5
    timeout_s: float = 600.0
    least: float = LEAST
    json_path: Path | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("name the job: commlayer headroom -- torchrun --nproc-per-node 2 train.py")
        for name, number in (("--steps", self.steps), ("--rounds", self.rounds), ("--warmup", self.warmup)):
            if number < 1:
                raise ValueError(f"{name} {number}: use at least 1")
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"--timeout {self.timeout_s:g}: use a number of seconds above 0")
        if not 0 <= self.least <= 1:
            raise ValueError(f"--least {self.least:g}: use a share from 0 to 1")
        check(self.json_path)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phase of each measured step: blocks, whose first step does not count."""
        blocks: list[Phase] = []
        for _ in range(self.rounds):
            for phase in ("real", "short", "none"):
                blocks += [phase] * (self.steps + 1)
        return tuple(blocks)


@dataclass(frozen=True)
class Report:
    """All that the command found."""

    split: Split
    verdict: str
    next_command: str
    is_little: bool
    backend: str
    ranks: int
    hosts: int
    takes_hook: bool
    """Whether each rank has a DistributedDataParallel whose hook settings can choose."""
    seconds: float
    command: Sequence[str]

    @property
    def table(self) -> dict[str, Any]:
        """Plain values, for JSON; times in seconds."""
        found = self.split
        engine = None if found.engine is None else dataclasses.asdict(found.engine)
        if engine is not None and found.engine is not None:
            engine["step"] = _timing(found.engine.step)
        low, high = found.share_interval
        return {
            "version": VERSION,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "split"},
            "command": list(self.command),
            "share": found.share,
            "share_interval": [low, high],
            "steps": {
                "as_is": _timing(found.as_is),
                "short": None if found.short is None else _timing(found.short),
                "left_out": _timing(found.left_out),
            },
            "most_s": {
                "all": found.all_s,
                "bytes": found.bytes_s,
                "latency": found.latency_s,
                "overlap": found.overlap_s,
                "transport": found.transport_s,
                "loss": found.loss_s,
                "stragglers": found.stragglers_s,
            },
            "straggler": dataclasses.asdict(found.straggler),
            "tcp_loss": found.tcp_loss,
            "engine": engine,
        }


def _timing(timing: Timing) -> dict[str, Any]:
    low, high = timing.quartiles_s
    return {"median_s": timing.median_s, "quartiles_s": [low, high], "steps_s": list(timing.steps_s)}


def is_reporter() -> bool:
    """Whether this starter tells what it finds: of those that `commlayer emulate` starts as ranks, the first one."""
    return os.environ.get("RANK", "0") == "0"


def run(options: Options, show: Callable[[Report], None], note: Note) -> int:
    """Runs the trials, shows the report on one host, and returns the exit status. Raises TrialError, ValueError."""
    report = measure(options, note)
    if not is_reporter():
        return EXIT_LITTLE
    deliver(report.table, options.json_path, lambda: show(report))
    return EXIT_LITTLE if report.is_little else EXIT_MUCH


def measure(options: Options, note: Note) -> Report:
    """Runs the trials: the job as it is, with communication changed, and on commlayer if that may win anything."""
    begin_s = time.monotonic()
    note(
        f"runs the job for {options.warmup + len(options.phases)} steps, with its communication as it is, shortened "
        "and left out in turns; the results of these steps are wrong and thrown away"
    )
    as_is = _trial(options, {}, options.phases, note)
    uses_engine = all(record.uses_engine for record in as_is.records)
    backend = as_is.records[0].backend
    if as_is.ranks < 2:
        raise TrialError("the job has one rank, which communicates with nobody: start it with more")
    phases, on_engine = as_is, as_is if uses_engine else None
    if uses_engine:
        note("the job runs on commlayer: runs it again with COMMLAYER_DISABLE=1, to leave its communication out")
        phases = _trial(options, WITHOUT_ENGINE, options.phases, note)
    found = split(as_is, phases, on_engine)
    if on_engine is None and "gloo" in backend and not is_little(found, options.least):
        note("runs the job on commlayer in gloo's place, to see its operations")
        on_engine = _on_engine(options, note)
        found = split(as_is, phases, on_engine)
    return Report(
        split=found,
        verdict=verdict(found, options.least),
        next_command=next_command(found, options.command, options.least),
        is_little=is_little(found, options.least),
        backend=backend,
        ranks=as_is.ranks,
        hosts=len({record.host for record in as_is.records}),
        takes_hook=all(record.takes_hook for record in as_is.records),
        seconds=time.monotonic() - begin_s,
        command=options.command,
    )


def _on_engine(options: Options, note: Note) -> Trial | None:
    """The job on commlayer; None if it fails there, which does not spoil the rest."""
    try:
        return _trial(options, ON_ENGINE, real(options.rounds * options.steps + 1), note)
    except TrialError as error:
        note(f"the job does not run on commlayer, so overlap and transport stay unknown: {error}")
        return None


def _trial(options: Options, environment: dict[str, str], phases: Sequence[Phase], note: Note) -> Trial:
    told_s = time.monotonic()

    def progress(done: int, steps: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _TELL_S:
            told_s = time.monotonic()
            note(f"{done} of {steps} steps measured")

    return run_trial(
        options.command,
        environment=environment,
        steps=len(phases),
        warmup=options.warmup,
        timeout_s=options.timeout_s,
        phases=phases,
        progress=progress,
    )
