"""`Shelf`: the contents that a reader gives to others, and who waits for which parts of them. It belongs to the thread
of the reader's `Intake`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from .answer import Place, part
from .content import Content
from .message import GONE, Want
from .outlet import Outlet
from .parts import PUBLISHER, Book, number_of

WANTS_MOST = 32
"""Seats that one reader waits for."""

SLOW_SHARE = 4
"""One of so many readers may be slow, and one of fewer, too."""

REMEMBERED = 8
"""Contents that are known to be gone."""


class Item(NamedTuple):
    """A content, all of it or what has come so far."""

    content: Content
    book: Book | None
    """The parts that have come; None: all."""

    @property
    def is_complete(self) -> bool:
        """Whether all of it can be given."""
        return self.book is None or self.book.is_complete

    def fits(self, want: Want) -> bool:
        """Whether its seats are those of another reader's plan."""
        return not want.deal or (
            self.book is not None and (self.book.deal, len(self.book.sources)) == (want.deal, want.seats)
        )

    def number(self, want: Want, at: int) -> int | None:
        """The part that is number `at` of a seat; None: it is not here yet, or there is none."""
        if want.deal:
            come = self.book.come[want.seat] if self.book is not None else []
            return come[at] if at < len(come) else None
        number = number_of(want.seat, at, want.seats)
        is_here = number < self.content.parts if self.book is None else self.book.has(number)
        return number if is_here else None

    def is_over(self, want: Want, at: int) -> bool:
        """Whether the seat has no part `at`."""
        counts = None if self.book is None else self.book.counts
        if want.deal:
            return counts is not None and at >= counts[want.seat]
        parts = self.content.parts if self.book is None else self.book.parts
        return parts is not None and number_of(want.seat, at, want.seats) >= parts


class Lending:
    """What leaves to one reader: `outlet.Leaving`."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.wants: deque[Want] = deque()
        self.at: dict[int, int] = {}
        """The next part of each seat."""

    def add(self, want: Want) -> None:
        """Takes a wish; those of an earlier question are over."""
        if self.wants and self.wants[0].request != want.request:
            self.wants.clear()
        self.wants = deque(other for other in self.wants if other.seat != want.seat)
        if len(self.wants) < WANTS_MOST:
            self.wants.append(want)
            self.at[want.seat] = want.at

    @property
    def message(self) -> list[Any] | None:
        """The next part that is here; None: there is none now."""
        for _ in range(len(self.wants)):
            want, at = self.wants[0], self.at[self.wants[0].seat]
            item = self._shelf.item(want.name)
            if self._shelf.is_gone(want):
                return [GONE, want.text(), b""]
            if item is not None:
                if item.is_over(want, at):
                    self.wants.popleft()
                    continue
                number = item.number(want, at)
                if number is not None:
                    return part(Place(want.request, want.seat, at, number), item.content)
            self.wants.rotate(-1)
        return None

    def advance(self) -> None:
        """The message has left; the next seat follows."""
        want = self.wants[0]
        if self._shelf.is_gone(want):
            self.wants.popleft()
            return
        self.at[want.seat] += 1
        self.wants.rotate(-1)


class Shelf:
    """Contents by name. Those that are held are the user's; nothing is written to them while they are here."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._gone: deque[str] = deque(maxlen=REMEMBERED)
        self._lendings: dict[bytes, Lending] = {}
        self._leaving: tuple[str, Item, Callable[[], None]] | None = None
        """One that others are still getting."""

    def item(self, name: str) -> Item | None:
        """The content of this name."""
        return self._items.get(name)

    def is_gone(self, want: Want) -> bool:
        """Whether it was here, and is no more. One that was not may come yet."""
        item = self._items.get(want.name)
        return want.name in self._gone if item is None else not item.fits(want)

    def put(self, name: str, content: Content, book: Book | None = None) -> None:
        """A content to give. One that is here keeps its book."""
        item = self._items.get(name)
        if name and (item is None or item.content is not content):
            self._items[name] = Item(content, book)

    def remove(self, name: str, content: Content, then: Callable[[], None] = lambda: None) -> None:
        """Gives a content no more, and calls `then` when its memory is free: at once, or after those who are getting it
        have it, if it is the only one of this kind."""
        item = self._items.get(name)
        if item is None or item.content is not content:
            then()
        elif self._leaving is None and item.is_complete and self._is_wanted(name):
            self._leaving = (name, item, then)
        else:
            self._drop(name)
            then()

    def passed(self, name: str, seat: int) -> int:
        """How many parts that the publisher has dealt to this seat have come, and gone on: all readers of the deal have
        them but a quarter, or one. So a few slow ones do not set the pace of the others, and of two none does."""
        item = self._items.get(name)
        if item is None or item.book is None:
            return 0
        gone = [
            lending.at[seat]
            for lending in self._lendings.values()
            if any(want.deal and (want.name, want.seat) == (name, seat) for want in lending.wants)
        ]
        missing = len(item.book.sources) - item.book.sources.count(PUBLISHER) - len(gone)
        have = sorted([0] * missing + gone + [len(item.book.come[seat])])
        return have[max(len(have) // SLOW_SHARE, min(len(have) - 1, 1))]

    def want(self, reader: bytes, want: Want) -> None:
        """Another reader asks for a seat's parts. It gets them as they come."""
        self._lendings.setdefault(reader, Lending(self)).add(want)

    def push(self, outlet: Outlet) -> bool:
        """Sends the parts for which there is room. Whether any."""
        is_any, ended = outlet.push(self._lendings)
        for reader in ended:
            self.forget(reader)
        if self._leaving is not None and not self._is_wanted(self._leaving[0]):
            name, item, then = self._leaving
            self._leaving = None
            if self._items.get(name) is item:
                self._drop(name)
            then()
        return is_any

    @property
    def is_asked(self) -> bool:
        """Whether a part that is here waits for room."""
        return any(lending.message is not None for lending in self._lendings.values())

    def forget(self, reader: bytes) -> None:
        """A reader has gone."""
        self._lendings.pop(reader, None)

    def _is_wanted(self, name: str) -> bool:
        return any(want.name == name for lending in self._lendings.values() for want in lending.wants)

    def _drop(self, name: str) -> None:
        del self._items[name]
        self._gone.append(name)
