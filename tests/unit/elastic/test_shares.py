"""The shares of a batch follow the ranks' speeds, and change rarely."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.frontend.elastic.shares import WINDOW, Speeds, shares


def slowest_s(counts: tuple[int, ...], speeds: list[float]) -> float:
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0]), min_size=1, max_size=4), st.integers(0, 12))
def test_no_other_shares_are_faster(speeds: list[float], total: int) -> None:
    found = shares(speeds, total)
    assert sum(found) == total
    assert min(found) >= (total >= len(speeds))
    least = 1 if total >= len(speeds) else 0
    others = [each for each in itertools.product(range(total + 1), repeat=len(speeds)) if sum(each) == total]
    best = min(slowest_s(each, speeds) for each in others if min(each) >= least)
    assert slowest_s(found, speeds) == pytest.approx(best)


def test_a_rank_of_half_the_speed_gets_half_the_samples() -> None:
    assert shares([1, 1, 1, 0.5], 56) == (16, 16, 16, 8)  # 1.75 times as fast as 14 each
    assert shares([0, 2, 1, 0], 6) == (2, 2, 1, 1)  # the unknown ones count as 1.5
    assert shares([0.0] * 3, 7) == (3, 2, 2)
    assert shares([1.0, 3.0, 2.0], 2) == (0, 1, 1)


def test_shares_change_after_a_window_and_only_where_it_pays() -> None:
    speeds = Speeds(by_speed=True)
    for step in range(WINDOW):
        assert speeds.shares(range(4), 56) == dict.fromkeys(range(4), 14), step
        speeds.advance({0: 100.0, 1: 100.0, 2: 100.0, 3: 50.0}, 56)
    assert speeds.shares(range(4), 56) == {0: 16, 1: 16, 2: 16, 3: 8}
    for _ in range(3 * WINDOW):
        speeds.advance({0: 101.0, 1: 99.0, 2: 100.0, 3: 52.0}, 56)  # noise
    assert speeds.shares(range(4), 56) == {0: 16, 1: 16, 2: 16, 3: 8}
    assert speeds.shares([0, 2, 3, 7], 64) == {0: 20, 2: 19, 3: 9, 7: 16}  # 7 is new: the mean of the others
    for _ in range(WINDOW):
        speeds.advance({0: 100.0, 1: 100.0, 2: 100.0, 3: 0.0}, 56)  # one has not measured
    assert speeds.shares(range(4), 56) == {0: 16, 1: 16, 2: 16, 3: 8}


def test_a_rank_tells_its_median_speed() -> None:
    speeds = Speeds(by_speed=True)
    assert speeds.own == 0
    for seconds in (0.1, 0.1, 9.0):
        speeds.note(5, seconds)
    assert speeds.own == pytest.approx(50)
    other = Speeds(by_speed=True)
    other.advance({0: 1.0}, 8)
    speeds.load(other.state())  # of another window
    assert (speeds.own, speeds.state()) == (0, other.state())
    fixed = Speeds(by_speed=False)
    fixed.note(5, 0.1)
    assert fixed.own == 0
