from collections.abc import Mapping
from typing import Any

import pytest

from commlayer.weights.answer import Place
from commlayer.weights.content import Code
from commlayer.weights.message import GONE, PART, Want
from commlayer.weights.outlet import Leaving, Outlet
from commlayer.weights.parts import PUBLISHER, Book
from commlayer.weights.shelf import Shelf


def content() -> Code:
    """Ten parts."""
    made = Code()
    for number in range(10):
        made.add(number, b"%d" % number)
    made.is_ended = True
    return made


CONTENT = content()


class Wire(Outlet):
    """Has room for a number of messages, and keeps them."""

    def __init__(self) -> None:
        self.sent: dict[bytes, list[list[Any]]] = {}
        self.room = 1000
        self.ended: list[bytes] = []

    def push(self, leaving: Mapping[bytes, Leaving]) -> tuple[bool, list[bytes]]:
        """All that is there, for which there is room."""
        before = self.room
        for reader, its in leaving.items():
            while self.room and its.message is not None:
                self.sent.setdefault(reader, []).append([bytes(frame) for frame in its.message])
                its.advance()
                self.room -= 1
        return self.room < before, self.ended

    def numbers(self, reader: bytes) -> list[int]:
        """The parts that have left to a reader."""
        assert all(kind == PART for kind, _, _ in self.sent[reader])
        for _, place, piece in self.sent[reader]:
            assert piece == b"%d" % Place.read(place).number
        return [Place.read(place).number for _, place, _ in self.sent[reader]]


def want(seat: int = 0, seats: int = 1, at: int = 0, name: str = "name", request: int = 3, deal: int = 0) -> Want:
    return Want(request, name, seat, seats, deal, at)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_a_seat_leaves_from_where_it_is_wanted(shelf: Shelf, wire: Wire) -> None:
    shelf.put("name", CONTENT)
    shelf.want(b"a", want(1, 3, 1))
    assert shelf.is_asked
    assert shelf.push(wire)
    assert wire.numbers(b"a") == [4, 7]
    assert not shelf.is_asked
    assert not shelf.push(wire)


def test_parts_leave_as_they_come(shelf: Shelf, wire: Wire) -> None:
    book = Book([PUBLISHER, "other"], 0.0)
    shelf.want(b"a", want(0, 3))
    shelf.want(b"a", want(1, 3))
    shelf.push(wire)
    shelf.put("name", CONTENT, book)
    for number in (0, 1, 2, 4, 3, 5, 7, 6, 8, 9):
        book.add(number % 2, number, 0.0)
        shelf.push(wire)
    assert sorted(wire.numbers(b"a")) == [0, 1, 3, 4, 6, 7, 9]
    assert wire.numbers(b"a")[:4] == [0, 1, 4, 3]


def test_a_later_question_ends_the_earlier(shelf: Shelf, wire: Wire) -> None:
    shelf.put("name", CONTENT)
    shelf.want(b"a", want(0, 2))
    wire.room = 2
    shelf.push(wire)
    shelf.want(b"a", want(1, 2, request=4))
    wire.room = 9
    shelf.push(wire)
    assert wire.numbers(b"a") == [0, 2, 1, 3, 5, 7, 9]


def test_what_is_gone_is_said(shelf: Shelf, wire: Wire) -> None:
    ended: list[str] = []
    shelf.put("name", CONTENT)
    shelf.remove("name", CONTENT, lambda: ended.append("name"))
    assert ended == ["name"]
    shelf.want(b"a", want(2, 4))
    shelf.push(wire)
    assert wire.sent[b"a"] == [[GONE, want(2, 4).text(), b""]]
    assert not shelf.is_asked


def test_one_content_stays_until_those_who_get_it_have_it(shelf: Shelf, wire: Wire) -> None:
    ended: list[str] = []
    for name in ("one", "two"):
        shelf.put(name, CONTENT)
        shelf.want(name.encode(), want(name=name))
    wire.room = 3
    shelf.push(wire)
    shelf.remove("one", CONTENT, lambda: ended.append("one"))
    shelf.remove("two", CONTENT, lambda: ended.append("two"))
    assert ended == ["two"]
    wire.room = 1000
    shelf.push(wire)
    shelf.push(wire)
    assert ended == ["two", "one"]
    assert wire.numbers(b"one") == list(range(10))
    assert wire.sent[b"two"][-1][0] == GONE


def test_what_is_not_complete_goes_at_once(shelf: Shelf, wire: Wire) -> None:
    ended: list[str] = []
    shelf.put("name", CONTENT, Book([PUBLISHER], 0.0))
    shelf.want(b"a", want())
    shelf.push(wire)
    shelf.remove("name", CONTENT, lambda: ended.append("name"))
    assert ended == ["name"]
    shelf.push(wire)
    assert wire.sent[b"a"] == [[GONE, want().text(), b""]]


def test_the_parts_of_a_deal_leave_as_they_were_dealt(shelf: Shelf, wire: Wire) -> None:
    book = Book([PUBLISHER, "b", "c"], 0.0, deal=5)
    shelf.put("name", CONTENT, book)
    shelf.want(b"b", want(0, 3, deal=5))
    shelf.want(b"c", want(0, 3, at=1, deal=5))
    for seat, number in ((0, 7), (1, 1), (0, 2), (0, 4)):
        book.add(seat, number, 0.0)
        shelf.push(wire)
    assert wire.numbers(b"b") == [7, 2, 4]
    assert wire.numbers(b"c") == [2, 4]
    assert shelf.is_asked is False
    book.end([3, 3, 4], 0.0)
    shelf.push(wire)
    assert not any(lending.wants for lending in shelf._lendings.values())


@pytest.mark.parametrize("deal", [0, 6])
def test_seats_of_another_deal_are_gone(shelf: Shelf, wire: Wire, deal: int) -> None:
    shelf.put("name", CONTENT, Book([PUBLISHER, "b"], 0.0, deal=deal) if deal else None)
    shelf.want(b"a", want(0, 2, deal=5))
    shelf.push(wire)
    assert wire.sent[b"a"] == [[GONE, want(0, 2, deal=5).text(), b""]]


def test_a_part_has_passed_when_all_readers_but_one_of_few_have_it(shelf: Shelf, wire: Wire) -> None:
    book = Book([PUBLISHER, "b", "c", "d", "e"], 0.0, deal=5)
    shelf.put("name", CONTENT, book)
    for number in range(4):
        book.add(0, number, 0.0)
    assert shelf.passed("name", 0) == 0  # nobody has asked yet
    for reader, room in ((b"b", 4), (b"c", 4), (b"d", 2)):
        assert shelf.passed("name", 0) == 0
        wire.room = room
        shelf.want(reader, want(0, 5, deal=5))
        shelf.push(wire)
    assert shelf.passed("name", 0) == 2
    for seat in range(1, 5):
        book.turn_to_publisher(seat)  # they have failed
    assert shelf.passed("name", 0) == 4
    assert shelf.passed("other", 0) == 0


def test_the_only_other_reader_does_not_set_the_pace(shelf: Shelf, wire: Wire) -> None:
    book = Book([PUBLISHER, "b"], 0.0, deal=5)
    shelf.put("name", CONTENT, book)
    wire.room = 1
    shelf.want(b"b", want(0, 2, deal=5))
    for number in range(4):
        book.add(0, number, 0.0)
        shelf.push(wire)
        assert shelf.passed("name", 0) == number + 1


def test_a_reader_that_has_gone_keeps_nothing_here(shelf: Shelf, wire: Wire) -> None:
    ended: list[str] = []
    shelf.put("name", CONTENT)
    shelf.want(b"a", want())
    shelf.remove("name", CONTENT, lambda: ended.append("name"))
    wire.room, wire.ended = 0, [b"a"]
    shelf.push(wire)
    assert ended == ["name"]


def test_other_memory_of_the_same_name_stays(shelf: Shelf, wire: Wire) -> None:
    shelf.put("name", content())
    shelf.put("name", CONTENT)
    shelf.remove("name", content())
    shelf.want(b"a", want())
    shelf.push(wire)
    assert wire.numbers(b"a") == list(range(10))
