"""Costs from recorded actions and timed transfers: seconds per stage, overhead per action, latency and rate.

Pure functions of numbers. `commlayer/frontend/pipelines/measure.py` records on the running job.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ..errors import ConfigError
from .actions import COMPUTATIONS, Action


class Timed(NamedTuple):
    """A computation that a rank has run."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in one stage: medians."""

    forward_s: float
    backward_s: float
    """B, or I and W together."""
    weight_s: float | None = None
    """W, where the schedule splits backward passes."""


def stage_times(records: Iterable[Timed]) -> dict[int, StageTimes]:
    """The times of each stage that was recorded.

    Raises ConfigError if a stage lacks a forward or a backward.
    """
    seconds: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for action, start_s, end_s in records:
        if action.kind in COMPUTATIONS:
            seconds[action.stage][action.kind].append(end_s - start_s)
    return {stage: _times(stage, kinds) for stage, kinds in sorted(seconds.items())}


def _times(stage: int, seconds: Mapping[str, list[float]]) -> StageTimes:
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    if "F" not in median or not ("B" in median or {"I", "W"} <= median.keys()):
        raise ConfigError(
            f"stage {stage}: recorded {', '.join(sorted(median)) or 'nothing'}; measure whole steps of training, with "
            f"forward and backward"
        )
    if "B" in median:  # zero-bubble schedules split only some backward passes
        return StageTimes(median["F"], median["B"], min(median["W"], median["B"]) if "W" in median else None)
    return StageTimes(median["F"], median["I"] + median["W"], median["W"])


def action_seconds(records: Sequence[Timed]) -> float:
    """Seconds of the interpreter from one computation of a rank to the next: sends, receives, hooks.

    Most gaps between computations have waiting in them, so this is the lower quartile. 0 for fewer than two records.
    """
    gaps = [max(later.start_s - earlier.end_s, 0.0) for earlier, later in pairwise(records)]
    if len(gaps) < 2:
        return gaps[0] if gaps else 0.0
    return statistics.quantiles(gaps, n=4, method="inclusive")[0]


class Line(NamedTuple):
    """Seconds of a transfer = latency + bytes x seconds per byte."""

    latency_s: float
    seconds_per_byte: float


def line(samples: Mapping[int, Sequence[float]]) -> Line:
    """Latency and rate from the seconds of transfers, by size in bytes.

    The line goes through the medians of the smallest and the largest size. Where noise makes the larger transfer
    faster, both are upper bounds.

    Raises ConfigError unless there are two sizes.
    """
    sizes = sorted(size for size, seconds in samples.items() if seconds)
    if len(sizes) < 2:
        raise ConfigError(f"{len(sizes)} sizes of transfers do not tell latency and rate apart; time two")
    small, large = sizes[0], sizes[-1]
    small_s, large_s = statistics.median(samples[small]), statistics.median(samples[large])
    slope = (large_s - small_s) / (large - small)
    if slope <= 0:
        return Line(small_s, large_s / large)
    return Line(max(small_s - slope * small, 0.0), slope)
