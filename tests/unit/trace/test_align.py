"""Offsets of clocks from the order of events: the bracket contains the truth, and drift is found."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.tools.trace.align import Alignment, Matrix, bound, consistent, solve, tightened, unbounded

MS = 1_000_000
EPOCH_NS = 1_790_000_000 * 1000 * MS
"""Times of today: nanoseconds since 1970 have to be exact."""

offsets_ns = st.lists(st.integers(-(10**13), 10**13), min_size=2, max_size=5)


def observed(draw: st.DataObject, offsets: list[int], pairs: list[tuple[int, int]], count: int = 3) -> Matrix:
    """The bounds from events on clocks with these true offsets: an event on the second clock of a pair comes some time
    after one on the first."""
    bounds = unbounded(len(offsets))
    for earlier, later in pairs * count:
        start, delay = draw.draw(st.tuples(st.integers(0, 10**12), st.integers(0, 10**9)))
        end = EPOCH_NS + start + delay - offsets[later]
        bound(bounds, [later], [end], [earlier], [EPOCH_NS + start - offsets[earlier]])
    return bounds


def errors_ns(found: list[Alignment], offsets: list[int]) -> list[float]:
    """How much the estimates miss the true offsets, relative to those of their references."""
    return [
        abs(clock.offset_ns - (true - offsets[clock.reference])) for clock, true in zip(found, offsets, strict=True)
    ]


@settings(max_examples=30, deadline=None)
@given(offsets_ns, st.data())
def test_the_bracket_contains_the_truth(offsets: list[int], data: st.DataObject) -> None:
    """Events between neighbours in both directions: the offsets of others follow from them."""
    around = [pair for one, other in pairwise(range(len(offsets))) for pair in ((one, other), (other, one))]
    found = solve(observed(data, offsets, around))
    assert {clock.reference for clock in found} == {0}
    assert all(clock.drift_ns == 0 for clock in found)
    for clock, error in zip(found, errors_ns(found, offsets), strict=True):
        assert clock.uncertainty_ns is not None
        assert error <= clock.uncertainty_ns + 0.01  # doubles
        assert clock.uncertainty_ns <= len(offsets) * 0.5e9 * 2


@settings(max_examples=30, deadline=None)
@given(offsets_ns, st.data())
def test_the_offsets_keep_every_bound(offsets: list[int], data: st.DataObject) -> None:
    """Midpoints of several brackets could contradict each other; those of closed bounds do not."""
    clocks = range(len(offsets))
    bounds = observed(data, offsets, [(one, other) for one in clocks for other in clocks if one != other], 2)
    found = np.array([clock.offset_ns for clock in solve(bounds)])
    assert (found[None, :] - found[:, None] <= bounds + 0.01).all()


def test_more_events_tighten_the_bracket() -> None:
    bounds = unbounded(2)
    widths = []
    for delay in (8 * MS, 2 * MS, 5 * MS):
        bound(bounds, [0, 1], [EPOCH_NS + delay, EPOCH_NS + delay], [0, 1], [EPOCH_NS, EPOCH_NS])
        widths.append(solve(bounds)[1].uncertainty_ns)
    assert widths == [8 * MS, 2 * MS, 2 * MS]


def test_the_midpoint_of_two_clocks() -> None:
    bounds = unbounded(2)
    bound(bounds, [1], [3000 * MS + 5], [0], [0])  # 1 ended at 3 s what 0 began at 0 s
    bound(bounds, [0], [15], [1], [3000 * MS])
    first, second = solve(bounds)
    assert first == Alignment(0.0, 0.0, 0)
    assert first.is_reference
    assert (second.offset_ns, second.uncertainty_ns) == (-3000 * MS + 5, 10)


def test_clocks_that_nothing_bounds_keep_their_time() -> None:
    bounds = unbounded(3)
    bound(bounds, [1], [700], [0], [0])  # one direction only
    assert solve(bounds) == [Alignment(0.0, None, number) for number in range(3)]


def test_pairs_without_a_common_operation_have_references_of_their_own() -> None:
    bounds = unbounded(4)
    for one, other in ((0, 2), (1, 3)):
        bound(bounds, [one, other], [100, 1100], [one, other], [0, 1000])
    found = solve(bounds)
    assert [clock.reference for clock in found] == [0, 1, 0, 1]
    assert [clock.offset_ns for clock in found] == [0, 0, -1000, -1000]


def drifted(bounds: Matrix, clock: int, drift_ns: int) -> None:
    """Later operations, after this clock moved by `drift_ns` against the others."""
    others = [number for number in range(len(bounds)) if number != clock]
    starts = [EPOCH_NS] * len(others)
    bound(bounds, [clock], [EPOCH_NS + drift_ns + 10], others, starts)
    bound(bounds, others, [start + 10 for start in starts], [clock], [EPOCH_NS + drift_ns])


@pytest.mark.parametrize("drift_ns", [5 * MS, -5 * MS])
def test_a_clock_that_drifts_is_reported_and_does_not_spoil_the_others(drift_ns: int) -> None:
    bounds = unbounded(4)
    everyone = range(4)
    bound(bounds, everyone, [EPOCH_NS + 100] * 4, everyone, [EPOCH_NS] * 4)
    drifted(bounds, 2, drift_ns)
    found = solve(bounds)
    assert [clock.drift_ns > 0 for clock in found] == [False, False, True, False]
    assert found[2].drift_ns == pytest.approx(5 * MS, abs=200)
    assert found[2].offset_ns == pytest.approx(-drift_ns / 2, abs=200)  # in the middle
    assert found[2].uncertainty_ns == pytest.approx(2.5 * MS, abs=200)
    assert [found[number].uncertainty_ns for number in (1, 3)] == [100, 100]


def test_two_clocks_that_contradict_each_other() -> None:
    bounds = unbounded(2)
    bound(bounds, [0, 1], [100, 100], [0, 1], [0, 0])
    drifted(bounds, 1, 9000)
    first, second = solve(bounds)
    assert (first.is_reference, second.reference) == (True, 0)
    assert second.drift_ns > 8000


def test_a_contradiction_of_three_clocks_is_found() -> None:
    """Each pair has a bracket, but the brackets do not fit together."""
    bounds = unbounded(3)
    for earlier, later in ((0, 1), (1, 2), (2, 0)):
        bound(bounds, [later], [1000 - 50], [earlier], [1000])
        bound(bounds, [earlier], [1100], [later], [1000])
    assert np.diagonal(tightened(bounds)).min() < 0
    kept, aside = consistent(bounds)
    assert (kept, list(aside)) == ([0, 1], [2])
    assert solve(bounds)[2].drift_ns > 0


def test_a_pair_that_contradicts_itself_is_reported_beside_a_clock_that_nothing_bounds() -> None:
    bounds = unbounded(3)
    for earlier, later in ((1, 2), (2, 1)):
        bound(bounds, [later], [0], [earlier], [100])
    found = solve(bounds)
    assert [clock.drift_ns for clock in found] == [0, 0, 200]
    assert found[2].reference == 1
    assert [clock.is_reference for clock in found] == [False, True, False]
