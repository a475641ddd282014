"""`Shelf`: the contents that a reader gives to others, and who waits for which parts of them. It belongs to the thread
of the reader's `Intake`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .answer import part
from .message import GONE, Want
from .outlet import Outlet
from .parts import Book, Cut

WANTS_MOST = 32
"""Seats that one reader waits for."""

REMEMBERED = 8
"""Contents that are known to be gone."""


class Item:
    """A content, all of it or what has come so far."""

    def __init__(self, memory: Tensor, book: Book | None) -> None:
        """`book`: the parts that have come; None: all."""
        self.memory, self.book = memory, book
        self.block = memory.numpy().data

    @property
    def is_complete(self) -> bool:
        """Whether all of it can be given."""
        return self.book is None or self.book.is_complete

    def has(self, number: int) -> bool:
        """Whether this part can be given."""
        return self.book is None or self.book.has(number)

    def fits(self, want: Want) -> bool:
        """Whether it is cut as another reader thinks."""
        return self.book is None or self.book.cut.part_bytes == want.part_bytes


class Lending:
    """What leaves to one reader: `outlet.Leaving`."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.wants: deque[Want] = deque()
        self._next: dict[int, int] = {}
        """The next part of each seat."""

    def add(self, want: Want) -> None:
        """Takes a wish; those of an earlier question are over."""
        if self.wants and self.wants[0].request != want.request:
            self.wants.clear()
        self.wants = deque(other for other in self.wants if other.seat != want.seat)
        if len(self.wants) < WANTS_MOST:
            self.wants.append(want)
            self._next[want.seat] = want.seat + want.at * want.seats

    @property
    def message(self) -> list[Any] | None:
        """The next part that is here; None: there is none now."""
        for _ in range(len(self.wants)):
            want, number = self.wants[0], self._next[self.wants[0].seat]
            item = self._shelf.item(want.name)
            if self._shelf.is_gone(want):
                return [GONE, want.text(), b""]
            if item is not None:
                cut = Cut(len(item.block), want.part_bytes)
                if number >= cut.parts:
                    self.wants.popleft()
                    continue
                if item.has(number):
                    return part(want.request, number, cut, item.block)
            self.wants.rotate(-1)
        return None

    def advance(self) -> None:
        """The message has left; the next seat follows."""
        want = self.wants[0]
        if self._shelf.is_gone(want):
            self.wants.popleft()
            return
        self._next[want.seat] += want.seats
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

    def put(self, name: str, memory: Tensor, book: Book | None = None) -> None:
        """A content to give."""
        if name:
            self._items[name] = Item(memory, book)

    def remove(self, name: str, memory: Tensor, then: Callable[[], None] = lambda: None) -> None:
        """Gives a content no more, and calls `then` when its memory is free: at once, or after those who are getting it
        have it, if it is the only one of this kind."""
        item = self._items.get(name)
        if item is None or item.memory is not memory:
            then()
        elif self._leaving is None and item.is_complete and self._is_wanted(name):
            self._leaving = (name, item, then)
        else:
            self._drop(name)
            then()

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
