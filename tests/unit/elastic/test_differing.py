"""Members that differ from most are found; among equally many, those that differ from the lowest member."""

from __future__ import annotations

from commlayer.frontend.elastic.differing import differing


def test_those_that_differ_from_most_are_found() -> None:
    assert differing({}) == set()
    assert differing({3: 7}) == set()
    assert differing({0: 7, 1: 7, 4: 7}) == set()
    assert differing({0: 5, 1: 7, 4: 7}) == {0}
    assert differing({4: 5, 1: 7}) == {4}
    assert differing({0: 1, 1: 2, 2: 3, 3: 2}) == {0, 2}
