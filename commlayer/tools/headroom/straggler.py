"""`Straggler`: the rank that computes longest, and whether it is always the same one or that of chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CHANCE = 0.05
"""Most likely share of jobs with equally fast ranks in which one is called slow."""


@dataclass(frozen=True)
class Straggler:
    """The slowest rank, without communication."""

    rank: int
    longer_s: float
    """Seconds that its step takes longer than the mean of the other ranks; the median over steps."""
    slowest_s: float
    """Seconds that the slowest rank of a step, whichever it is, takes longer than the mean of the others; the median
    over steps."""
    is_same: bool
    """Whether it is the slowest one in more steps than chance explains."""


def straggler(steps_s: Sequence[Sequence[float]]) -> Straggler:
    """The slowest of the ranks, from the seconds of each step on each rank: `steps_s[rank][step]`.

    Whether it is more than chance is a sign test: if all ranks were equally fast, each would be the slowest one in a
    step with probability 1 / ranks. The probability that one of them is so in this many steps is at most the binomial
    tail times the number of ranks (Bonferroni).
    """
    ranks = len(steps_s)
    steps = list(zip(*steps_s, strict=False))
    slowest = max(range(ranks), key=lambda rank: statistics.median(step[rank] for step in steps))
    if ranks == 1:
        return Straggler(slowest, 0.0, 0.0, is_same=False)
    longer_s = statistics.median(_longer_s(step, step[slowest]) for step in steps)
    slowest_s = statistics.median(_longer_s(step, max(step)) for step in steps)
    count = sum(step[slowest] == max(step) for step in steps)
    return Straggler(slowest, longer_s, slowest_s, is_same=ranks * _tail(len(steps), count, 1 / ranks) < CHANCE)


def _longer_s(step_s: Sequence[float], one_s: float) -> float:
    """The time of one rank less the mean of the others."""
    return one_s - (sum(step_s) - one_s) / (len(step_s) - 1)


def _tail(draws: int, least: int, probability: float) -> float:
    """The probability of at least this many successes."""
    return sum(math.comb(draws, k) * probability**k * (1 - probability) ** (draws - k) for k in range(least, draws + 1))
