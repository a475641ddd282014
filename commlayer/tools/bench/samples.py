"""Statistics of measured times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(samples: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile, which is always a measured value. With less than 100 samples p99 is the maximum.

    Raises ValueError without samples or when `percent` is not in (0, 100].
    """
    if not samples or not 0 < percent <= 100:
        raise ValueError(f"percentile {percent} of {len(samples)} samples: expected 0 < percent <= 100 and a sample")
    # round(): 0.07 * 100 is 7.000000000000001, and ceil would then skip a rank
    rank = math.ceil(round(len(samples) * percent / 100, 9))
    return sorted(samples)[rank - 1]


@dataclass(frozen=True)
class Summary:
    """One backend at one size: every iteration of every round, in microseconds."""

    time_us: float
    """The headline: median over rounds of each round's mean iteration time."""
    p50_us: float
    p99_us: float
    min_us: float
    max_us: float
    mean_us: float
    samples: int
    rounds_us: tuple[float, ...]
    """Each round's mean, in the order measured."""
    spread: float
    """(slowest round - fastest round) / median round: the uncertainty of a ratio."""


def summarise(rounds: Sequence[Sequence[float]]) -> Summary:
    """Summarises iteration times in microseconds, one inner sequence per round. Raises ValueError on an empty round."""
    if not rounds or not all(rounds):
        raise ValueError("no samples to summarise: every round needs at least one iteration")
    everything = [sample for samples in rounds for sample in samples]
    means = tuple(statistics.fmean(samples) for samples in rounds)
    time_us = statistics.median(means)
    return Summary(
        time_us=time_us,
        p50_us=percentile(everything, 50),
        p99_us=percentile(everything, 99),
        min_us=min(everything),
        max_us=max(everything),
        mean_us=statistics.fmean(everything),
        samples=len(everything),
        rounds_us=means,
        spread=(max(means) - min(means)) / time_us if time_us else 0.0,
    )
