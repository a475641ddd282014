import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.weights.parts import (
    GRACE_LEAST_S,
    GRACE_MOST_S,
    PART_LEAST_BYTES,
    PART_MOST_BYTES,
    PUBLISHER,
    TAIL_LEAST_BYTES,
    Book,
    next_bytes,
    part_bytes_for,
)


def test_long_contents_have_longer_parts_and_the_last_ones_are_short() -> None:
    assert part_bytes_for(1 << 20) == PART_LEAST_BYTES
    assert part_bytes_for(1 << 40) == PART_MOST_BYTES
    assert next_bytes(1 << 40, PART_MOST_BYTES) == PART_MOST_BYTES
    assert next_bytes(1 << 20, PART_MOST_BYTES) == (1 << 20) // 32
    assert next_bytes(1, PART_MOST_BYTES) == TAIL_LEAST_BYTES


class Giver:
    """The source of a seat: it sends the seat's parts in order, some twice, and may die."""

    def __init__(self, numbers: list[int], seat: int, at: int, source: str) -> None:
        self.parts = list(enumerate(numbers))[at:]
        self.seat, self.source = seat, source


@given(data=st.data(), parts=st.integers(0, 40), seats=st.integers(1, 6))
def test_all_parts_come_once_whatever_fails(data: st.DataObject, parts: int, seats: int) -> None:
    """Any division among the seats, any order, duplicates, and readers that die or are replaced while their parts still
    come; the number of parts is known at any time."""
    sources = [data.draw(st.sampled_from([PUBLISHER, f"reader {seat}"])) for seat in range(seats)]
    given_to: list[list[int]] = [[] for _ in sources]
    for number in range(parts):
        given_to[data.draw(st.integers(0, seats - 1))].append(number)
    book = Book(sources, 0.0, deal=1)
    givers = [Giver(given_to[seat], seat, 0, source) for seat, source in enumerate(sources)]
    taken: list[int] = []
    while not book.is_complete:
        able = [giver for giver in givers if giver.parts]
        what = data.draw(st.sampled_from(["part", "part", "twice", "lost", "counted"])) if able else "counted"
        if what == "counted":
            if book.counts is None:
                book.end(list(map(len, given_to)), 1.0)
            continue
        giver = data.draw(st.sampled_from(able))
        if what == "lost" and giver.source != PUBLISHER and book.sources[giver.seat] == giver.source:
            book.turn_to_publisher(giver.seat)
            givers.append(Giver(given_to[giver.seat], giver.seat, len(book.come[giver.seat]), PUBLISHER))
            if data.draw(st.booleans()):
                giver.parts.clear()  # it died; else its parts come late
            continue
        at, number = giver.parts.pop(0)
        for _ in range(2 if what == "twice" else 1):
            assert book.has(number) == (number in taken)
            if book.is_next(giver.seat, at, number, giver.source):
                book.add(giver.seat, number, 1.0)
                taken.append(number)
    assert sorted(taken) == list(range(parts))
    assert book.come == given_to
    assert not any(book.open_seats(source) for source in {*sources, PUBLISHER})


def test_a_part_out_of_turn_is_refused_from_its_source_alone() -> None:
    book = Book(["one", "two"], 0.0)
    with pytest.raises(ValueError, match="part 1 of seat 1, not part 0"):
        book.is_next(1, 1, 3, "two")
    assert not book.is_next(1, 1, 3, "one")
    book.end([2, 1], 0.0)
    for seat, at in ((2, 0), (0, 2), (1, 1)):
        with pytest.raises(ValueError, match=f"part {at} of seat {seat}"):
            book.is_next(seat, at, 9, "one")


def test_a_part_of_another_seat_is_refused() -> None:
    book = Book(["one", "two"], 0.0)
    with pytest.raises(ValueError, match="part 1, which is not part 0 of seat 0"):
        book.is_next(0, 0, 1, "one")
    dealt = Book(["one", "two"], 0.0, deal=1)
    assert dealt.is_next(0, 0, 7, "one")
    dealt.add(0, 7, 0.0)
    with pytest.raises(ValueError, match="part 7 as part 0 of seat 1, and of another one before"):
        dealt.is_next(1, 0, 7, "two")
    dealt.turn_to_publisher(1)
    assert not dealt.is_next(1, 0, 7, "two")  # it has been replaced
    with pytest.raises(ValueError, match="part 7 as part 0 of seat 1"):
        dealt.is_next(1, 0, 7, PUBLISHER)


@pytest.mark.parametrize("counts", [[2], [0, 1], [2, 2, 2]])
def test_other_counts_are_refused(counts: list[int]) -> None:
    book = Book(["one", "two"], 0.0)
    book.add(0, 0, 0.0)
    with pytest.raises(ValueError, match="parts of the seats"):
        book.end(counts, 0.0)


def filled_book(interval_s: float) -> Book:
    """Three sources, of which the last gives two parts, and the others all of theirs."""
    book = Book([PUBLISHER, "one", "two"], 0.0)
    now_s = 0.0
    for number in range(300):
        if number % 3 < 2 or number < 6:
            now_s += interval_s / 3
            book.add(number % 3, number, now_s)
    return book


@pytest.mark.parametrize("interval_s", [0.001, 1.0, 100.0])
def test_a_source_is_late_after_a_multiple_of_the_usual_time(interval_s: float) -> None:
    book = filled_book(interval_s)
    assert book.late(1e9) == []  # it may have nothing to give
    book.end([100, 100, 100], 0.0)
    book._complete_s.clear()  # the other rule
    heard_s = 2 * interval_s
    least, most = max(4 * interval_s, GRACE_LEAST_S), max(16 * interval_s, GRACE_LEAST_S)
    assert book.late(heard_s + 0.9 * min(least, GRACE_MOST_S)) == []
    assert book.late(heard_s + 1.1 * min(most, GRACE_MOST_S)) == [2]
    book.turn_to_publisher(2)
    assert book.late(1e9) == []  # the publisher is the last source


@pytest.mark.parametrize("took_s", [0.1, 100.0])
def test_a_source_that_is_much_slower_than_half_of_the_others_is_late(took_s: float) -> None:
    book = Book([PUBLISHER, "one", "two", "slow"], 0.0)
    book.end([100] * 4, 0.0)
    for number in range(200):
        book.add(number % 2, number, took_s)
    limit_s = 2 * took_s + GRACE_LEAST_S
    for turn in range(90):  # each after little time
        for seat in (2, 3):
            book.add(seat, 200 + 2 * turn + seat, took_s + (limit_s - took_s) * turn / 90)
    assert book.late(0.99 * limit_s) == []
    assert book.late(1.01 * limit_s) == [2, 3]


def test_nobody_is_late_before_the_first_part() -> None:
    book = Book([PUBLISHER, "one", "two"], 5.0)
    book.end([100] * 3, 5.0)
    assert book.late(5.0 + 0.9 * GRACE_MOST_S) == []
    assert book.late(5.0 + 1.1 * GRACE_MOST_S) == [1, 2]
