import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlayer.weights.content import Code, Whole
from commlayer.weights.deal import BESIDE_MOST, WINDOW_LEAST, WINDOW_SHARE, Deal


@given(data=st.data(), size=st.integers(0, 6 << 20), seats=st.integers(1, 6))
def test_each_part_is_given_once_whoever_fails(data: st.DataObject, size: int, seats: int) -> None:
    whole = Whole(torch.empty(size, dtype=torch.uint8))
    deal = Deal(whole, seats)
    here = set(range(seats))
    while not deal.is_ended:
        what = data.draw(st.sampled_from(["give", "give", "give", "distrust", "leave"]))
        seat = data.draw(st.sampled_from(sorted(here)))
        if what == "distrust":
            deal.distrust(seat)
        elif what == "leave" and len(here) > 1:
            here.discard(seat)
            deal.leave(seat)
        elif deal.next(seat) is not None:
            deal.give(seat)
        elif all(deal.next(other) is None for other in here):
            for other in here:  # readers pass on what they get
                deal.passed(other, len(deal.given[other]))
            assert any(deal.next(other) is not None for other in here)
    assert sorted(number for numbers in deal.given for number in numbers) == list(range(whole.parts))


def test_a_seat_that_passes_nothing_on_gets_few_parts() -> None:
    whole = Whole(torch.empty(8 << 20, dtype=torch.uint8))
    deal = Deal(whole, 2)
    while not deal.is_ended:
        for seat in range(2):
            if deal.next(seat) is not None:
                deal.give(seat)
        deal.passed(0, len(deal.given[0]))
    assert len(deal.given[1]) <= 1 + whole.parts // (2 * WINDOW_SHARE)


def test_a_code_is_given_as_it_grows() -> None:
    code = Code(100)
    deal = Deal(code, 1)
    assert deal.next(0) is None
    for number in range(2 * WINDOW_LEAST + 1):
        code.add(number, b"x")
    for number in range(2 * WINDOW_LEAST):
        assert deal.next(0) == number
        deal.give(0)
    assert deal.next(0) is None
    assert not deal.is_ended
    deal.passed(0, 2)
    deal.give(0)
    code.is_ended = True
    assert deal.is_ended


@pytest.mark.parametrize("seats", [1, 3])
def test_seats_that_have_all_failed_are_used(seats: int) -> None:
    deal = Deal(Whole(torch.empty(9, dtype=torch.uint8)), seats)
    for seat in range(seats):
        deal.distrust(seat)
    assert deal.next(0) == 0


def test_few_parts_are_on_their_way_beside_a_training() -> None:
    deal = Deal(Whole(torch.empty(8 << 20, dtype=torch.uint8)), 8)
    deal.is_beside = True
    for seat in range(8):
        if deal.next(seat) is not None:
            deal.give(seat)
    assert sum(map(len, deal.given)) == BESIDE_MOST
    deal.passed(0, 1)
    assert deal.next(7) is not None
