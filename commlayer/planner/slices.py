"""Token slices of a sequence for pipelining within it (TeraPipe, arXiv 2102.07988).

A causal model computes a slice of tokens from the slices before it, so stage k works on slice i while stage k + 1 works
on slice i - 1. Short slices fill the pipeline soon; long slices use the device better.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ..config import whole
from ..errors import ConfigError

SliceTime = Callable[[int, int, int], float]
"""Seconds of one stage for `batch` sequences, a slice of `length` tokens after `context` tokens, with its transfer."""


@dataclass(frozen=True)
class Slices:
    """Parts of the batch, each with its slices in order."""

    parts: tuple[tuple[int, tuple[int, ...]], ...]
    """Pairs of a number of sequences and the lengths of their slices in tokens."""
    time_s: float
    """Seconds of the pipeline: sum of the slices' times, and K - 1 times the longest."""


def slices(length: int, stages: int, time: SliceTime, *, batch: int = 1, step: int = 1, skip_s: float = 0.0) -> Slices:
    """The split of `batch` sequences of `length` tokens with the least T = sum t_i + (K - 1) max t_i over K `stages`.

    For each cap on t_i: S(i) = min over k of S(i - k) + t(k, i - k), and a knapsack over parts of the batch. The caps
    are the times of the possible slices, in ascending order, until K cap reaches the best T.

    Args:
        step: slices are multiples of it, in tokens. With n = length / step, the worst case is O(batch^2 n^4).
        skip_s: of caps within so many seconds, tries only the largest; T is at most (K - 1) skip_s above the least.

    Raises:
        ConfigError: a number below 1, a length that is no multiple of `step`, or a negative time.
    """
    for name, value in (("length", length), ("stages", stages), ("batch", batch), ("step", step)):
        if whole(value, 0) < 1:
            raise ConfigError(f"{name}={value} is not valid; give a whole number of at least 1")
    if length % step:
        raise ConfigError(f"length={length} is no multiple of step={step}; choose a step that divides it")
    if not skip_s >= 0:
        raise ConfigError(f"skip_s={skip_s} is negative; give seconds of at least 0")

    @cache
    def seconds(sequences: int, first: int, end: int) -> float:
        value = time(sequences, (end - first) * step, first * step)
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"time({sequences}, {(end - first) * step}, {first * step})={value} is no duration; return seconds >= 0"
            )
        return value

    steps = length // step
    sizes = range(1, batch + 1)
    caps = sorted({seconds(b, i, j) for b in sizes for j in range(1, steps + 1) for i in range(j)})
    best = Slices((), math.inf)
    place = 0
    while place < len(caps) and stages * caps[place] < best.time_s:
        place = bisect_right(caps, caps[place] + skip_s)
        cap = caps[place - 1]  # the largest of those within skip_s
        found = _under(cap, batch, steps, seconds)
        if found is not None:
            parts = tuple((b, tuple(step * (j - i) for i, j in cuts)) for b, cuts in found)
            times = [seconds(b, i, j) for b, cuts in found for i, j in cuts]
            total = math.fsum(times) + (stages - 1) * max(times)
            if total < best.time_s:
                best = Slices(parts, total)
    return best


Part = tuple[int, list[tuple[int, int]]]


def _under(cap: float, batch: int, steps: int, seconds: Callable[[int, int, int], float]) -> list[Part] | None:
    """The parts with the least sum of times, of which none exceeds `cap`; None if there are none."""
    sums: dict[int, float] = {}
    cuts: dict[int, list[tuple[int, int]]] = {}
    for size in range(1, batch + 1):
        sums[size], cuts[size] = _sequence(cap, steps, lambda i, j, b=size: seconds(b, i, j))  # type: ignore[misc]
    total, taken = [0.0], [0]
    for count in range(1, batch + 1):
        value, size = min((total[count - size] + sums[size], size) for size in range(1, count + 1))
        total.append(value)
        taken.append(size)
    if total[batch] == math.inf:
        return None
    parts, left = list[Part](), batch
    while left:
        parts.append((taken[left], cuts[taken[left]]))
        left -= taken[left]
    return parts


def _sequence(cap: float, steps: int, seconds: Callable[[int, int], float]) -> tuple[float, list[tuple[int, int]]]:
    """S(steps), and the slices as ranges."""
    total, start = [0.0], [0]
    for end in range(1, steps + 1):
        best, first = math.inf, 0
        for i in range(end):
            value = seconds(i, end)
            if value <= cap and total[i] + value < best:
                best, first = total[i] + value, i
        total.append(best)
        start.append(first)
    cuts, end = [], steps
    while end and total[steps] < math.inf:
        cuts.append((start[end], end))
        end = start[end]
    return total[steps], cuts[::-1]
