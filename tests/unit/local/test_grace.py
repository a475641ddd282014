"""The grace of a late loop follows the lateness of its turns, and the length of its steps."""

from __future__ import annotations

import pytest

from commlayer.frontend.local.grace import SECONDS_LEAST, TURNS_LEAST, Grace


def grace_of(late_s: list[float], step_s: float) -> Grace:
    grace, now_s = Grace(), 100.0
    for late in late_s:
        grace.left(now_s)
        now_s += step_s
        grace.came(now_s)
        grace.began(late)
    return grace


def test_no_site_is_left_out_before_enough_turns() -> None:
    assert grace_of([0.0] * (TURNS_LEAST - 1), 1.0).seconds is None
    assert grace_of([0.0] * TURNS_LEAST, 1.0).seconds is not None


def test_a_site_may_be_two_steps_late() -> None:
    assert grace_of([0.0] * TURNS_LEAST, 3.0).seconds == pytest.approx(6.0)
    assert grace_of([0.0] * TURNS_LEAST, 0.001).seconds == SECONDS_LEAST


def test_usual_lateness_counts_and_rare_stalls_do_not() -> None:
    usual = [0.5] * 30
    assert grace_of(usual, 0.1).seconds == pytest.approx(4 * 0.5 + 2 * 0.1)
    assert grace_of([*usual[:-6], *[60.0] * 6], 0.1).seconds == pytest.approx(4 * 0.5 + 2 * 0.1)


def test_a_step_that_stalls_changes_little() -> None:
    grace = grace_of([0.0] * 10, 0.2)
    grace.left(1000.0)
    grace.came(1060.0)
    assert grace.seconds == pytest.approx(0.4)


def test_old_turns_are_forgotten() -> None:
    assert grace_of([*[9.0] * 40, *[0.0] * 40], 1.0).seconds == pytest.approx(2.0)
