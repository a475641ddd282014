import struct
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from commlayer.weights.message import GONE, PART, Want
from commlayer.weights.outlet import Leaving, Outlet
from commlayer.weights.parts import PUBLISHER, Book, Cut
from commlayer.weights.shelf import Shelf

CONTENT = torch.arange(95, dtype=torch.uint8)


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
            number = struct.unpack("<QQ", place)[1]
            assert piece == CONTENT[10 * number : 10 * number + 10].numpy().tobytes()
        return [struct.unpack("<QQ", place)[1] for _, place, _ in self.sent[reader]]


def want(seat: int = 0, seats: int = 1, at: int = 0, name: str = "name", request: int = 3) -> Want:
    return Want(request, name, 10, seat, seats, at)


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
    book = Book(Cut(95, 10), [PUBLISHER, "other"], 0.0)
    shelf.want(b"a", want(0, 3))
    shelf.want(b"a", want(1, 3))
    shelf.push(wire)
    shelf.put("name", CONTENT, book)
    for number in (0, 1, 2, 4, 3, 5, 7, 6, 8, 9):
        book.add(number, 0.0)
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
    shelf.put("name", CONTENT, Book(Cut(95, 10), [PUBLISHER], 0.0))
    shelf.want(b"a", want())
    shelf.push(wire)
    shelf.remove("name", CONTENT, lambda: ended.append("name"))
    assert ended == ["name"]
    shelf.push(wire)
    assert wire.sent[b"a"] == [[GONE, want().text(), b""]]


def test_a_content_that_is_cut_otherwise_is_none(shelf: Shelf, wire: Wire) -> None:
    shelf.put("name", CONTENT, Book(Cut(95, 5), [PUBLISHER], 0.0))
    shelf.want(b"a", want())
    shelf.push(wire)
    assert wire.sent[b"a"] == [[GONE, want().text(), b""]]


def test_a_reader_that_has_gone_keeps_nothing_here(shelf: Shelf, wire: Wire) -> None:
    ended: list[str] = []
    shelf.put("name", CONTENT)
    shelf.want(b"a", want())
    shelf.remove("name", CONTENT, lambda: ended.append("name"))
    wire.room, wire.ended = 0, [b"a"]
    shelf.push(wire)
    assert ended == ["name"]


def test_other_memory_of_the_same_name_stays(shelf: Shelf, wire: Wire) -> None:
    shelf.put("name", CONTENT.clone())
    shelf.put("name", CONTENT)
    shelf.remove("name", CONTENT.clone())
    shelf.want(b"a", want())
    shelf.push(wire)
    assert wire.numbers(b"a") == list(range(10))
