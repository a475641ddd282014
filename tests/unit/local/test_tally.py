"""`Tally`: steps and samples since the last sync of a fragment."""

from __future__ import annotations

from commlayer.frontend.local.tally import Tally


def test_each_fragment_counts_since_its_own_sync() -> None:
    tally = Tally(2)
    tally.add(3.0)
    assert tally.take(0) == (1, 3.0)
    tally.add(2.0)
    assert tally.take(1) == (2, 5.0)
    assert tally.take(0) == (1, 2.0)


def test_a_site_without_a_step_since_the_last_sync_has_no_weight() -> None:
    tally = Tally(1)
    tally.add(3.0)
    assert tally.take(0) == (1, 3.0)
    assert tally.take(0) == (0, 0.0)
    tally.add(0.0)
    assert tally.take(0) == (1, 0.0)


def test_a_restored_tally_goes_on() -> None:
    tally, other = Tally(2), Tally(2)
    tally.add(3.0)
    tally.take(1)
    tally.add(1.0)
    other.restore(tally.state())
    tally.add(1.0)
    assert [other.take(0), other.take(1), other.take(1)] == [(2, 4.0), (1, 1.0), (0, 0.0)]
