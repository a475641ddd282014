"""`Arguments`: the schedule that `every="auto"` takes for the H* that it has measured."""

import pytest

import commlayer
from commlayer.frontend.local.arguments import Arguments


@pytest.mark.parametrize(
    ("least", "fragments", "every", "used"),
    [(2, 4, 8, 4), (9, 4, 9, 4), (2, 1, 2, 1), (2, 2, 4, 2), (2, 16, 8, 8), (40, 16, 40, 16), (512, 4, 512, 4)],
)
def test_turns_of_a_measured_link(least: int, fragments: int, every: int, used: int) -> None:
    given = Arguments("auto", fragments, None, None, "none", None, 0, None, commlayer.Fine(), None, None, False, None)
    turns = given.turns_of(least)
    assert turns is not None
    assert (turns.every, turns.fragments, turns.delay) == (every, used, -(-every // used))
    assert given.turns_of(1) is None
    assert given.turns_of(0) is None
