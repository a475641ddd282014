"""Values that differ from most are found; among equally many, those that differ from the first."""

from __future__ import annotations

from commlayer.frontend.work.odd import odd_ones, usual


def test_those_that_differ_from_most_are_found() -> None:
    assert odd_ones([]) == []
    assert odd_ones([7]) == []
    assert odd_ones([7, 7, 7]) == []
    assert odd_ones([5, 7, 7]) == [0]
    assert odd_ones(["a", "b"]) == [1]
    assert odd_ones([1, 2, 3, 2]) == [0, 2]
    assert usual([1, 2, 3, 2]) == 1
