"""Both ends of a pair agree on their incarnation."""

import itertools

from commlayer.transport.incarnation import Incarnations, agreed

STATES: list[Incarnations] = [
    {},
    *({"7": (n, lives), "8": (n, lives), "9": (5, False)} for n in (0, 1, 3) for lives in (True, False)),
]


def test_both_ends_agree_and_nobody_is_lost_in_the_incarnation() -> None:
    for own, theirs in itertools.product(STATES, STATES):
        found = agreed(own, 7, theirs, 8)
        assert found == agreed(theirs, 8, own, 7)
        for end, other in ((own, "8"), (theirs, "7")):
            number, lives = end.get(other, (0, True))
            assert found > number or (found == number and lives)


def test_an_incarnation_ends_only_if_one_end_has_lost_the_other_in_it() -> None:
    assert agreed({}, 1, {}, 2) == 0
    assert agreed({"2": (0, False)}, 1, {}, 2) == 1
    assert agreed({"2": (1, True)}, 1, {"1": (0, False)}, 2) == 1  # the other end has begun it since
    assert agreed({"2": (1, False)}, 1, {"1": (1, True)}, 2) == 2
    assert agreed({"3": (4, False)}, 1, {"4": (4, False)}, 2) == 0  # of others
