import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.weights.parts import (
    GRACE_LEAST_S,
    GRACE_MOST_S,
    PART_LEAST_BYTES,
    PART_MOST_BYTES,
    PUBLISHER,
    Book,
    Cut,
    part_bytes_for,
)


@given(size=st.integers(0, 5000), part_bytes=st.integers(1, 700))
def test_parts_cover_a_content(size: int, part_bytes: int) -> None:
    cut = Cut(size, part_bytes)
    spans = [cut.span(number) for number in range(cut.parts)]
    assert [place for span in spans for place in range(span.start, span.stop)] == list(range(size))


def test_long_contents_have_longer_parts() -> None:
    assert part_bytes_for(1 << 20) == PART_LEAST_BYTES
    assert part_bytes_for(1 << 40) == PART_MOST_BYTES


class Giver:
    """The source of a seat: it sends the seat's parts in order, some twice, and may die."""

    def __init__(self, book: Book, seat: int, at: int, source: str) -> None:
        self.numbers = list(range(seat + at * len(book.sources), book.cut.parts, len(book.sources)))
        self.seat, self.source = seat, source


@given(data=st.data(), parts=st.integers(0, 40), seats=st.integers(1, 6))
def test_all_parts_come_once_whatever_fails(data: st.DataObject, parts: int, seats: int) -> None:
    """Any order among the seats, duplicates, and readers that die or are replaced while their parts still come."""
    sources = [data.draw(st.sampled_from([PUBLISHER, f"reader {seat}"])) for seat in range(seats)]
    book = Book(Cut(parts * 7, 7), sources, 0.0)
    givers = [Giver(book, seat, 0, source) for seat, source in enumerate(sources)]
    taken: list[int] = []
    while not book.is_complete:
        giver = data.draw(st.sampled_from([giver for giver in givers if giver.numbers]))
        what = data.draw(st.sampled_from(["part", "part", "twice", "lost"]))
        if what == "lost" and giver.source != PUBLISHER and book.sources[giver.seat] == giver.source:
            book.turn_to_publisher(giver.seat)
            givers.append(Giver(book, giver.seat, book.at(giver.seat), PUBLISHER))
            if data.draw(st.booleans()):
                giver.numbers.clear()  # it died; else its parts come late
            continue
        number = giver.numbers.pop(0)
        for _ in range(2 if what == "twice" else 1):
            assert book.has(number) == (number in taken)
            if book.is_next(number, giver.source):
                book.add(number, 1.0)
                taken.append(number)
    assert sorted(taken) == list(range(parts))
    assert all(book.has(number) for number in range(parts))
    assert not any(book.open_seats(source) for source in {*sources, PUBLISHER})


def test_a_part_out_of_turn_is_refused_from_its_source_alone() -> None:
    book = Book(Cut(100, 10), ["one", "two"], 0.0)
    with pytest.raises(ValueError, match="part 3, not part 1"):
        book.is_next(3, "two")
    assert not book.is_next(3, "one")
    for number in (-1, 10):
        with pytest.raises(ValueError, match="of 10"):
            book.is_next(number, "one")


def filled_book(interval_s: float) -> tuple[Book, float]:
    """Three sources, of which the last gives two parts, and the others all of theirs."""
    book = Book(Cut(300, 1), [PUBLISHER, "one", "two"], 0.0)
    now_s = 0.0
    for number in range(300):
        if number % 3 < 2 or number < 6:
            now_s += interval_s / 3
            book.add(number, now_s)
    return book, now_s


@pytest.mark.parametrize("interval_s", [0.001, 1.0, 100.0])
def test_a_source_is_late_after_a_multiple_of_the_usual_time(interval_s: float) -> None:
    book, _ = filled_book(interval_s)
    book._complete_s.clear()  # the other rule
    heard_s = 2 * interval_s
    least, most = max(4 * interval_s, GRACE_LEAST_S), max(16 * interval_s, GRACE_LEAST_S)
    assert book.late(heard_s + 0.9 * min(least, GRACE_MOST_S)) == []
    assert book.late(heard_s + 1.1 * min(most, GRACE_MOST_S)) == [2]
    book.turn_to_publisher(2)
    assert book.late(1e9) == []  # the publisher is the last source


@pytest.mark.parametrize("took_s", [0.1, 100.0])
def test_a_source_that_is_much_slower_than_half_of_the_others_is_late(took_s: float) -> None:
    book = Book(Cut(400, 1), [PUBLISHER, "one", "two", "slow"], 0.0)
    for number in range(400):
        if number % 4 < 2:
            book.add(number, took_s)
    limit_s = 2 * took_s + GRACE_LEAST_S
    for turn in range(90):  # each after little time
        for seat in (2, 3):
            book.add(seat + 4 * turn, took_s + (limit_s - took_s) * turn / 90)
    assert book.late(0.99 * limit_s) == []
    assert book.late(1.01 * limit_s) == [2, 3]


def test_nobody_is_late_before_the_first_part() -> None:
    book = Book(Cut(300, 1), [PUBLISHER, "one", "two"], 5.0)
    assert book.late(5.0 + 0.9 * GRACE_MOST_S) == []
    assert book.late(5.0 + 1.1 * GRACE_MOST_S) == [1, 2]
