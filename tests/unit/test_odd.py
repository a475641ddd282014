"""Values that differ from most are found; among equally many, those that differ from the first."""

from __future__ import annotations

from commlayer.frontend.work.odd import differing, odd_ones, usual


def test_those_that_differ_from_most_are_found() -> None:
    assert odd_ones([]) == []
    assert odd_ones([7]) == []
    assert odd_ones([7, 7, 7]) == []
    assert odd_ones([5, 7, 7]) == [0]
    assert odd_ones(["a", "b"]) == [1]
    assert odd_ones([1, 2, 3, 2]) == [0, 2]
    assert usual([1, 2, 3, 2]) == 1


def test_a_difference_is_told_by_ranks() -> None:
    assert differing([4, 4], [0, 1]) == ""
    assert differing(["a", "b", "b"], [0, 3, 5]) == "'a' on rank 0, 'b' on rank 3"
