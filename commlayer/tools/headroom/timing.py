"""`Timing`: the steps of one phase of a trial, with their spread."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..job.record import Record, Step
from ..job.spec import Phase

_RESAMPLES = 1000
_SEED = 14


@dataclass(frozen=True)
class Timing:
    """Times of equal steps, in seconds."""

    steps_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median."""
        return statistics.median(self.steps_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The middle half of the steps."""
        if len(self.steps_s) < 2:
            return self.steps_s[0], self.steps_s[0]
        low, _, high = statistics.quantiles(self.steps_s, n=4, method="inclusive")
        return low, high


def phase_steps(record: Record, phase: Phase) -> list[Step]:
    """The steps of a phase without the first one of each block, in which ranks and network still change over."""
    pairs = zip(record.steps, record.steps[1:], strict=False)
    return [step for before, step in pairs if before.phase == step.phase == phase]


def timing(records: Sequence[Record], phase: Phase, over: Callable[[Sequence[float]], float]) -> Timing | None:
    """The steps of a phase; the time of a step is `over` those of the ranks. None without such steps."""
    times = [[step.seconds for step in phase_steps(record, phase)] for record in records]
    steps = tuple(over(of_step) for of_step in zip(*times, strict=False))
    return Timing(steps) if steps else None


def share_interval(whole: Timing, left: Timing) -> tuple[float, float]:
    """The share of `whole` that goes where `left` remains: 95 % of it, by resampling the steps (bootstrap)."""
    draw = random.Random(_SEED)  # noqa: S311  # statistics

    def median(steps: Sequence[float]) -> float:
        return statistics.median(draw.choices(steps, k=len(steps)))

    shares = sorted(1 - median(left.steps_s) / median(whole.steps_s) for _ in range(_RESAMPLES))
    return shares[round(0.025 * _RESAMPLES)], shares[round(0.975 * _RESAMPLES) - 1]
