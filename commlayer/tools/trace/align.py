"""Offsets between the clocks of several ranks, from the order of events alone: pure functions of numbers.

An event on one clock that cannot come after an event on another one bounds the difference of their offsets from one
side. The tightest bounds from both sides are the bracket that must contain the true difference. The estimate is its
midpoint, the uncertainty half its width.

The idea is that of Duda, Harrus, Haddad and Bernard, "Estimating global time in distributed systems" (ICDCS 1987), who
bound one clock's line by the messages to and from another one, and of the intersection of intervals in NTP (Marzullo
1984; RFC 5905, section 11.2.1), which sets clocks aside that contradict the others. This module has constant offsets,
no lines: a clock that drifts is found and reported, and not corrected. For more than two clocks, the bounds are a
system of difference constraints, which shortest paths solve (Cormen et al., "Introduction to Algorithms").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

NEVER = np.inf
"""The bound of two clocks that no pair of events orders."""


@dataclasses.dataclass(frozen=True)
class Alignment:
    """The offset of one clock: common time = the clock's time + `offset_ns`."""

    offset_ns: float
    uncertainty_ns: float | None
    """Half the bracket. 0: a reference. None: nothing bounds the clock from both sides, and it keeps its own time."""
    reference: int
    """Number of the clock that has offset 0 and that this clock is compared with; its own number: it is one."""
    drift_ns: float = 0.0
    """How far its bounds contradict those of other clocks; unless 0, no constant offset is right."""

    @property
    def is_reference(self) -> bool:
        """Whether other clocks were compared with this one."""
        return self.uncertainty_ns == 0.0 and self.offset_ns == 0.0


def unbounded(count: int) -> Matrix:
    """The bounds of `count` clocks before anything is known: `bounds[a, b]` is the most that offset b - offset a can
    be."""
    bounds = np.full((count, count), NEVER)
    np.fill_diagonal(bounds, 0.0)
    return bounds


def bound(
    bounds: Matrix, later: Sequence[int], ends_ns: npt.ArrayLike, earlier: Sequence[int], starts_ns: npt.ArrayLike
) -> None:
    """Tightens `bounds`: no event of `ends_ns`, on the clocks `later`, came before any of `starts_ns`, on `earlier`.

    ends[i] + offset[later[i]] >= starts[j] + offset[earlier[j]] for all i and j. No clock may be twice in `later`, nor
    in `earlier`. A clock does not bound itself.
    """
    ends, starts = np.asarray(ends_ns, np.int64), np.asarray(starts_ns, np.int64)
    grid = np.ix_(np.asarray(later, np.intp), np.asarray(earlier, np.intp))
    bounds[grid] = np.minimum(bounds[grid], (ends[:, None] - starts[None, :]).astype(np.float64))
    np.fill_diagonal(bounds, 0.0)


def solve(bounds: Matrix) -> list[Alignment]:
    """The alignment of every clock. The clock with the lowest number of those that bound each other is the reference.

    The offsets keep all bounds, except those of clocks that contradict others.
    """
    kept, contradictions = consistent(bounds)
    closed = tightened(bounds[np.ix_(kept, kept)])
    found: dict[int, Alignment] = {}
    for place, clock in enumerate(kept):
        mutual = np.flatnonzero(np.isfinite(closed[place]) & np.isfinite(closed[:, place]))
        first = int(mutual[0])
        high, low = float(closed[first, place]), -float(closed[place, first])
        alone = len(mutual) == 1 and len(bounds) > 1
        found[clock] = Alignment((high + low) / 2, None if alone else (high - low) / 2, kept[first])
    aligned = dict(found)
    for clock, contradiction_ns in contradictions.items():
        found[clock] = drifting = _drifting(bounds, clock, contradiction_ns, aligned)
        if aligned.get(drifting.reference, drifting).uncertainty_ns is None:
            found[drifting.reference] = Alignment(0.0, 0.0, drifting.reference)
    return [found[clock] for clock in range(len(bounds))]


def tightened(bounds: Matrix) -> Matrix:
    """The tightest bounds that follow from all: shortest paths (Floyd and Warshall). A negative number on the diagonal:
    bounds contradict each other."""
    closed: Matrix = bounds.copy()
    for middle in range(len(closed)):
        np.minimum(closed, closed[:, middle, None] + closed[None, middle, :], out=closed)
    return closed


def consistent(bounds: Matrix) -> tuple[list[int], dict[int, float]]:
    """The clocks whose bounds agree, and the others with their largest contradiction.

    Sets one clock aside after another, each time the one that contradicts the rest most; of equals, the one with the
    highest number.
    """
    kept, aside = list(range(len(bounds))), dict[int, float]()
    while True:
        part = bounds[np.ix_(kept, kept)]
        excess = np.minimum(part + part.T, 0.0)  # the excess of pairs
        if not excess.any():
            excess = np.diag(np.minimum(np.diagonal(tightened(part)), 0.0))  # the excess of longer circles
        if not excess.any():
            return kept, aside
        worst = len(kept) - 1 - int(np.argmin(excess.sum(axis=1)[::-1]))
        aside[kept.pop(worst)] = -float(excess[worst].min())


def _drifting(bounds: Matrix, clock: int, contradiction_ns: float, aligned: dict[int, Alignment]) -> Alignment:
    """The middle of the contradiction between a clock and those that are aligned. Its offset passed through this range:
    at one time it was at one end or beyond, at another time at the other end."""
    ranges: dict[int, tuple[float, float]] = {}
    for other, alignment in aligned.items():
        slack = alignment.uncertainty_ns or 0.0
        low, high = ranges.get(alignment.reference, (-NEVER, NEVER))
        low = max(low, alignment.offset_ns - slack - bounds[clock, other])
        ranges[alignment.reference] = low, min(high, alignment.offset_ns + slack + bounds[other, clock])
    for reference, (low, high) in sorted(ranges.items()):
        if np.isfinite(low) and np.isfinite(high):
            return Alignment(float(high + low) / 2, abs(float(high - low)) / 2, reference, contradiction_ns)
    return Alignment(0.0, None, clock, contradiction_ns)
