"""`commlayer tune`: finds the parts of a job's step, ranks settings by the model, tries and writes the best ones."""

from __future__ import annotations

import os
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import config_file
from ...config import sources
from ..headroom import command as headroom
from ..headroom.timing import Timing
from ..headroom.verdict import seconds
from ..job.trial import run_trial
from ..json_output import check
from .arm import Arm, toml
from .halving import Outcome, Tried, candidates, load_optuna, prediction_error, search
from .model import Model
from .reasons import reasons, summary, told_error
from .space import Space

FILE = Path("commlayer.toml")
VERSION = 1
"""The version of the JSON's form."""

Note = Callable[[str], None]
Advance = Callable[[Tried], None]


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    command: Sequence[str]
    allowed: tuple[str, ...] = ()
    trials: int = 6
    """Arms to try, beside the default."""
    steps: int = 12
    """Measured steps of an arm in the last rung."""
    warmup: int = 3
    timeout_s: float = 600.0
    file: Path = FILE
    force: bool = False
    json_path: Path | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("name the job: commlayer tune -- torchrun --nproc-per-node 2 train.py")
        for name, number, least in (
            ("--trials", self.trials, 1),
            ("--steps", self.steps, 6),
            ("--warmup", self.warmup, 1),
        ):
            if number < least:
                raise ValueError(f"{name} {number}: use at least {least}")
        Space.of(self.allowed, 0.0, on_gloo=False, has_network=False, takes_hook=False)  # raises
        if self.file.exists() and not self.force:
            raise ValueError(f"{self.file} exists: name another file with --out, or write over it with --force")
        for path, option in ((self.file, "--out"), (self.json_path, "--json")):
            check(path, option)


@dataclass(frozen=True)
class Report:
    """All that the command found."""

    command: Sequence[str]
    verdict: str
    """The verdict of `commlayer headroom`."""
    outcome: Outcome | None
    """None: communication is not the job's problem, and nothing was tried."""
    reasons: dict[str, str]
    space: Space | None
    text: str
    """The text of the file; empty: the job is best as it is."""
    seconds: float

    @property
    def summary(self) -> str:
        """The result in a sentence or two."""
        return self.verdict if self.outcome is None else summary(self.outcome)

    @property
    def table(self) -> dict[str, Any]:
        """Plain values, for JSON; times in seconds."""
        found = self.outcome
        return {
            "version": VERSION,
            "command": list(self.command),
            "summary": self.summary,
            "verdict": self.verdict,
            "settings": found.chosen.arm.settings if found else {},
            "reasons": self.reasons,
            "gain": found.gain if found else 0.0,
            "gain_interval": list(found.gain_interval) if found else [0.0, 0.0],
            "arms": len(self.space.arms()) if self.space else 0,
            "tried": [_row(tried) for tried in found.tried] if found else [],
            "seconds": self.seconds,
        }


def _row(tried: Tried) -> dict[str, Any]:
    return {
        "arm": str(tried.arm),
        "settings": tried.arm.settings,
        "predicted_s": tried.predicted_s,
        "prediction_error": tried.prediction_error,
        "median_s": tried.timing.median_s if tried.timing else None,
        "steps_s": list(tried.timing.steps_s) if tried.timing else [],
        "rungs": tried.rungs,
        "fault": tried.fault,
    }


def run(
    options: Options,
    note: Note,
    advance: Advance = lambda _: None,
    begin: Callable[[int], None] = lambda _: None,
    narrowed: Callable[[Space], Space] = lambda space: space,
) -> Report:
    """Finds the settings, and writes the file. `begin` gets the number of arms before the first trial, and `narrowed`
    returns the part of a space to search.

    Raises TrialError, ValueError, ConfigError.
    """
    load_optuna()
    file = config_file.of_job(os.environ)
    sources(file, os.environ)  # raises for wrong settings, before anything runs
    begin_s = time.monotonic()
    profile = headroom.measure(
        headroom.Options(options.command, steps=3, rounds=2, warmup=options.warmup, timeout_s=options.timeout_s), note
    )
    if profile.is_little:
        return Report(options.command, profile.verdict, None, {}, None, "", time.monotonic() - begin_s)
    model = Model.of(profile.split, profile.hosts)
    space, idle = _space(options, profile, model)
    space = narrowed(space)
    if idle:
        note(idle)
    arms = [(arm, model.seconds(arm)) for arm in space.arms()]
    if len(arms) == 1:
        verdict = f"{profile.verdict}\n\nNo setting that tune may try acts on this job. {idle}".rstrip()
        return Report(options.command, verdict, None, {}, space, "", time.monotonic() - begin_s)
    chosen = candidates(arms, options.trials)
    known = {Arm(): profile.split.as_is}
    alone = Arm(replaces_gloo=space.replaces_gloo)
    if profile.split.engine is not None and not alone.is_default:
        known[alone] = profile.split.engine.step  # it comes last: little is lost when it is pruned
        chosen = [*(pair for pair in chosen if pair[0] != alone), (alone, model.seconds(alone))]
    note(_plan(arms, chosen, model, known))
    begin(len(chosen))
    outcome = search(chosen, lambda arm, steps: trial(options, arm, steps), options.steps, known=known, tell=advance)
    why = reasons(outcome, model)
    text = ""
    if outcome.chosen is not outcome.default:
        text = _text(options, outcome, why, file)
        if headroom.is_reporter():
            options.file.write_text(text, encoding="utf-8")
    return Report(options.command, profile.verdict, outcome, why, space, text, time.monotonic() - begin_s)


def _space(options: Options, profile: headroom.Report, model: Model) -> tuple[Space, str]:
    """The settings that act on this job, and a sentence on those that do not."""
    has_network = profile.hosts > 1 or model.round_trip_s > 0
    space = Space.of(
        options.allowed,
        model.nbytes,
        on_gloo="gloo" in profile.backend,
        has_network=has_network,
        takes_hook=profile.takes_hook,
    )
    idle = []
    if not profile.takes_hook:
        idle.append("overlap, buckets and codecs need a DistributedDataParallel without a communication hook")
    elif not has_network and {"compressed", "lossy"}.intersection(options.allowed):
        idle.append("codecs and loss bounds change packets, and the ranks of one host share memory")
    return space, "".join(f"not tried: {reason}" for reason in idle)


def _plan(
    arms: Sequence[tuple[Arm, float]],
    chosen: Sequence[tuple[Arm, float]],
    model: Model,
    known: Mapping[Arm, Timing],
) -> str:
    """What the search will try, with the error of the predictions so far."""
    error = prediction_error([Tried(arm, predicted_s, known.get(arm)) for arm, predicted_s in chosen])
    best_s = min(predicted_s for _, predicted_s in chosen[1:])
    return (
        f"{len(arms)} settings are possible; the model predicts {seconds(best_s)} per step for the best, and "
        f"{seconds(model.default_s)} as it is"
        + ("" if error is None else f" (for commlayer alone it was {told_error(error)})")
        + f"; tries {len(chosen)} of them"
    )


def trial(options: Options, arm: Arm, steps: int) -> Timing:
    """The steps of the job with an arm. A step takes the mean of its times on the ranks. Raises TrialError."""
    found = run_trial(
        options.command,
        environment=arm.environment,
        steps=steps,
        warmup=options.warmup,
        timeout_s=options.timeout_s,
    )
    return Timing(tuple(statistics.fmean(times) for times in zip(*found.step_s, strict=True)))


def _text(options: Options, outcome: Outcome, why: dict[str, str], file: config_file.ConfigFile) -> str:
    """The file: the settings that the job has from its file already, and the chosen ones."""
    merged = {section: dict(entries) for section, entries in file.sections.items()}
    for section, entries in outcome.chosen.arm.settings.items():
        merged.setdefault(section, {}).update(entries)
    head = f"# Written by commlayer tune -- {shlex.join(options.command)}\n# {summary(outcome)}\n\n"
    return head + toml(merged, why)
