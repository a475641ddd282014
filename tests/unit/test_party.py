"""What a party tells of itself in the log."""

import pytest

from commlayer.frontend.group.party import change


@pytest.mark.parametrize(
    ("gone", "newest", "told"),
    [
        ({3, 2}, [], "without [2, 3]"),
        (set(), [4], "as [4] join"),
        ({2}, [4, 5], "without [2] and as [4, 5] join"),
        (set(), [], "as before"),
    ],
)
def test_a_change_names_those_that_are_gone_and_those_that_join(gone: set[int], newest: list[int], told: str) -> None:
    assert change(gone, newest) == told
