from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlayer.weights.content import Code, Whole
from commlayer.weights.deal import BESIDE_MOST_BYTES, WINDOW_LEAST, WINDOW_LEAST_BYTES, WINDOW_SHARE, Deal
from commlayer.weights.parts import GRACE_FACTOR, GRACE_MOST_S

WHOLE = Whole(torch.empty(8 << 20, dtype=torch.uint8))


@given(data=st.data(), size=st.integers(0, 6 << 20), seats=st.integers(1, 6))
def test_the_readers_that_are_here_get_all_parts_whoever_fails(data: st.DataObject, size: int, seats: int) -> None:
    whole = Whole(torch.empty(size, dtype=torch.uint8))
    deal = Deal(whole, seats, 0.0)
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
        assert all(deal.next(gone) is None for gone in set(range(seats)) - here)


def test_a_seat_that_passes_nothing_on_gets_few_parts() -> None:
    whole = Whole(torch.empty(8 << 20, dtype=torch.uint8))
    deal = Deal(whole, 2, 0.0)
    while not deal.is_ended:
        for seat in range(2):
            if deal.next(seat) is not None:
                deal.give(seat)
        deal.passed(0, len(deal.given[0]))
    assert len(deal.given[1]) <= 1 + whole.parts // (2 * WINDOW_SHARE)


@pytest.mark.parametrize("mb", [1, 2, 12])
def test_short_parts_leave_ahead_of_the_news_of_others_but_not_all_of_a_short_content(mb: int) -> None:
    whole = Whole(torch.empty(mb << 20, dtype=torch.uint8))
    deal = Deal(whole, 8, 0.0)
    while deal._next < whole.parts - 20:
        for seat in range(8):
            if deal.next(seat) is not None:
                deal.give(seat)
                deal.passed(seat, len(deal.given[seat]))
    (count,) = taken(deal, [0])
    ahead_bytes = sum(len(whole.part(number)) for number in deal.given[0][-count:])
    least_bytes = min(WINDOW_LEAST_BYTES, whole.size // 64)
    assert least_bytes <= ahead_bytes < 2 * least_bytes + (32 << 10)


def test_a_reader_passes_on_no_more_than_it_was_given() -> None:
    found = []
    for said in (1, 10**6):
        deal = Deal(WHOLE, 1, 0.0)
        deal.give(0)
        deal.passed(0, said)
        found += taken(deal, [0])
    assert found[0] == found[1]


def test_a_code_is_given_as_it_grows() -> None:
    code = Code(100)
    deal = Deal(code, 1, 0.0)
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
    deal = Deal(Whole(torch.empty(9, dtype=torch.uint8)), seats, 0.0)
    for seat in range(seats):
        deal.distrust(seat)
    assert deal.next(0) == 0


def test_few_parts_are_on_their_way_beside_a_training() -> None:
    deal = Deal(WHOLE, 8, 0.0)
    deal.is_beside = True
    for _ in range(WHOLE.parts):
        for seat in range(8):
            if deal.next(seat) is not None:
                deal.give(seat)
    given = [number for numbers in deal.given for number in numbers]
    assert sum(len(WHOLE.part(number)) for number in given) == BESIDE_MOST_BYTES
    deal.passed(0, 1)
    assert deal.next(7) is not None


def taken(deal: Deal, seats: Iterable[int]) -> list[int]:
    """How many parts each of these seats gets now."""
    found = []
    for seat in seats:
        before = len(deal.given[seat])
        while deal.next(seat) is not None:
            deal.give(seat)
        found.append(len(deal.given[seat]) - before)
    return found


@pytest.mark.parametrize("end", [Deal.leave, Deal.distrust])
def test_a_reader_that_ends_beside_a_training_takes_no_room_from_others(end: Callable[[Deal, int], None]) -> None:
    deal = Deal(WHOLE, 3, 0.0)
    deal.is_beside = True
    assert taken(deal, range(3)) == [4, 4, 0]  # one seat has half of them at most
    end(deal, 0)
    assert taken(deal, range(3)) == [0, 0, 4]


def test_readers_that_are_stuck_beside_a_training_stop_the_others_for_the_grace_time() -> None:
    deal = Deal(WHOLE, 3, 0.0)
    deal.is_beside = True
    assert taken(deal, (2, 1, 0)) == [4, 4, 0]
    deal.look(0.9 * GRACE_MOST_S)
    assert taken(deal, (2, 1, 0)) == [0, 0, 0]
    deal.look(1.1 * GRACE_MOST_S)
    assert taken(deal, (2, 1, 0)) == [0, 0, 4]


@pytest.mark.parametrize("share", [0.8, 1.2])
def test_a_seat_may_be_silent_for_a_multiple_of_the_usual_time(share: float) -> None:
    deal = Deal(WHOLE, 2, 0.0)
    assert deal.next(1) is not None
    deal.give(1)
    for now_s in range(round(share * GRACE_FACTOR * 2)):  # a part in 2 s from each of two seats, if they were alike
        deal.look(float(now_s))
        deal.give(0)
        deal.passed(0, len(deal.given[0]))
    deal.passed(1, 1)  # at last
    assert (deal.next(1) is None) == (share > 1)


def test_readers_that_are_all_stuck_get_parts_again() -> None:
    code = Code()
    for number in range(99):
        code.add(number, b"x")
    deal = Deal(code, 2, 0.0)
    assert taken(deal, range(2)) == [2 * WINDOW_LEAST] * 2
    deal.look(0.9 * GRACE_MOST_S)
    assert taken(deal, range(2)) == [0, 0]
    deal.look(1.1 * GRACE_MOST_S)
    assert taken(deal, range(2)) == [2 * WINDOW_LEAST] * 2
