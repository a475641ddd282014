"""tests/conftest.py: which parameter sets of slow folders a run draws."""

import math

from tests.conftest import left_out

NAMES = [f"a.py::test_many[{number}]" for number in range(7)]
ALONE = ["a.py::test_alone", "b.py::test_one_set[0]"]


def drawn(draw: str) -> set[str]:
    return {*NAMES, *ALONE} - left_out(NAMES + ALONE, draw)


def test_a_third_of_the_sets_is_drawn_and_every_test_runs() -> None:
    for draw in range(50):
        chosen = drawn(str(draw))
        assert set(ALONE) <= chosen
        assert len(chosen & set(NAMES)) == math.ceil(len(NAMES) / 3)


def test_the_same_draw_has_the_same_sets_and_others_have_others() -> None:
    assert drawn("1") == drawn("1")
    assert set().union(*(drawn(str(draw)) for draw in range(50))) == {*NAMES, *ALONE}


def test_new_sets_do_not_change_what_is_drawn_of_another_test() -> None:
    others = [f"b.py::test_others[{number}]" for number in range(5)]
    assert left_out(NAMES, "3") == left_out(NAMES + others, "3") & set(NAMES)
