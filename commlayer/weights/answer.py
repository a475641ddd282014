"""An answer on its way, in parts: `Departure` at the publisher, `Arrival` at a reader.

The parts are short, so that heartbeats pass between them and a connection with a slow link is no silent one. Few are in
the queue of a connection at a time, so a reader that joins costs the publisher little memory. A difference leaves while
it is coded, and is decoded while it comes.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from . import content
from .content import TAG_BYTES, Code, Content, Whole
from .deal import Deal
from .held import Held, Pool
from .layout import Layout
from .message import DIFFERENCE, LAST, PART, TEXT, WHOLE, Head, Plan
from .parts import PART_MOST_BYTES, PUBLISHER, Book, number_of


class Place(NamedTuple):
    """Where a part belongs: the second frame of a message."""

    request: int
    """The number of the question."""
    seat: int = 0
    at: int = 0
    """Its number in the seat, or in the text."""
    number: int = 0
    """Its number in the content."""

    def pack(self) -> bytes:
        """As bytes."""
        return _PLACE.pack(*self)

    @classmethod
    def read(cls, frame: Any) -> Place:
        """Raises ValueError for a frame that is none."""
        if len(frame) != _PLACE.size:
            raise ValueError("a part without its place")
        return cls(*_PLACE.unpack(frame))


_PLACE = struct.Struct("<QQQQ")


def part(place: Place, source: Content) -> list[Any]:
    """The message with one part of a content."""
    return [PART, place.pack(), source.part(place.number)]


class Departure:
    """An answer that leaves: its head, then the text, and the parts of the content that the publisher gives."""

    def __init__(
        self, kind: bytes, head: Head, plan: Plan, layout: bytes, source: Content, held: Held | None, deal: Deal | None
    ) -> None:
        """`layout`: its text, if the reader lacks it. `source`: the content, which may still grow. `deal`: of a plan
        with one; the reader's own seat is that of the publisher."""
        self.head, self.plan, self.deal = head, plan, deal
        self.held = held
        """The version whose memory it sends; None for a difference."""
        self.blamed: set[int] = set()
        """The seats whose readers have failed."""
        self._source = source
        self._opening: Iterator[list[Any]] = self._opened(kind, layout)
        self._opened_with: list[Any] | None = next(self._opening)
        self._runs: deque[list[int]] = deque()
        """Seats that the publisher gives, and how many of their parts have left."""
        if deal is None:
            self._runs.extend([seat, 0] for seat, giver in enumerate(plan.sources) if giver == PUBLISHER)
        self._is_told = False
        """Whether LAST has left."""
        self._next: Callable[[], None] = self._open
        """What `advance` notes down."""

    @property
    def lasts(self) -> bool:
        """Whether it must stay after all has left: parts that other readers lack may be asked of it."""
        return self.plan.is_shared or not self._is_told

    @property
    def message(self) -> list[Any] | None:
        """What leaves next; None: nothing now. It decides what `advance` notes down: a content may grow in between."""
        if self._opened_with is not None:
            self._next = self._open
            return self._opened_with
        is_ended = self._source.is_ended  # before the number of parts, of which the last comes first
        for run in self._runs:
            seat, at = run
            number = self._number(seat, at)
            if number is not None:
                self._next = partial(self._run, run)
                return part(Place(self.head.request, seat, at, number), self._source)
        if self.deal is not None:
            own = self.plan.own
            number = self.deal.next(own)
            if number is not None:
                self._next = partial(self.deal.give, own)
                return part(Place(self.head.request, own, len(self.deal.given[own]), number), self._source)
        if not self._is_told and (is_ended if self.deal is None else self.deal.is_ended):
            self._next = self._tell
            counts = self._counts()
            return [LAST, Place(self.head.request).pack(), struct.pack(f"<{len(counts)}Q", *counts)]
        return None

    def advance(self) -> None:
        """The message that was read last has left."""
        self._next()

    def _open(self) -> None:
        self._opened_with = next(self._opening, None)

    def _run(self, run: list[int]) -> None:
        run[1] += 1

    def _tell(self) -> None:
        self._is_told = True

    def give(self, seat: int, at: int) -> None:
        """Sends a seat's parts from its part number `at` on, too."""
        self._runs.append([seat, at])

    def _number(self, seat: int, at: int) -> int | None:
        """The part that is number `at` of a seat; None: it is not here yet, or there is none."""
        if self.deal is not None:
            given = self.deal.given[seat]
            return given[at] if at < len(given) else None
        number = number_of(seat, at, len(self.plan.sources))
        return number if number < self._source.parts else None

    def _counts(self) -> list[int]:
        """How many parts each seat has."""
        if self.deal is not None:
            return [len(given) for given in self.deal.given]
        seats = len(self.plan.sources)
        return [len(range(seat, self._source.parts, seats)) for seat in range(seats)]

    def _opened(self, kind: bytes, layout: bytes) -> Iterator[list[Any]]:
        yield [kind, self.head.text(), self.plan.text()]
        pieces = (layout[first : first + PART_MOST_BYTES] for first in range(0, len(layout), PART_MOST_BYTES))
        whole = self._source if isinstance(self._source, Whole) and self.head.tags_bytes else None
        tags = () if whole is None else whole.tags(self.plan.name)
        for at, piece in enumerate(itertools.chain(pieces, tags)):
            yield [TEXT, Place(self.head.request, at=at).pack(), piece]


class Arrival:
    """An answer that comes. Its state lies in memory of its own, which is none of a version before the digest says
    so."""

    def __init__(self, kind: bytes, head: Head, plan: Plan, held: Held | None, pool: Pool | None, now_s: float) -> None:
        """`held`, `pool`: the version that the reader holds, and the blocks for others of its layout. Raises ValueError
        for a head that is none of this kind."""
        if kind not in (WHOLE, DIFFERENCE):
            raise ValueError(f"a message of kind {kind!r:.40}")
        self.head, self.plan = head, plan
        self.is_whole = kind == WHOLE
        self.layout: Layout | None = None
        self.pool: Pool | None = None
        """Blocks for versions of this layout."""
        self.book: Book | None = None
        """The parts of the content, once the text has come."""
        self.content: Content | None = None
        """What has come, for other readers."""
        self.received_bytes = 0
        self._held = held
        self._ready_pool = pool
        self._text, self._texts = bytearray(), 0
        self._tags = b""
        self._is_damaged = False
        if held is None or held.layout.fingerprint != head.layout or head.layout_bytes:
            if not self.is_whole:
                raise ValueError(f"a difference to version {head.base}, of another layout")
            if not head.layout_bytes:
                raise ValueError("a state without its layout")
        if not head.layout_bytes + head.tags_bytes:
            self._begin(now_s)

    @property
    def is_complete(self) -> bool:
        """Whether all of it has come."""
        return self.book is not None and self.book.is_complete

    def is_own(self, place: Place) -> bool:
        """Whether a part belongs to this answer, not to an earlier one."""
        return place.request == self.head.request

    def add_text(self, place: Place, piece: memoryview, now_s: float) -> None:
        """Takes a piece of the text. Raises ValueError for one that does not come next, and MismatchError if it
        completes a layout with other tensors than those of the version that is held."""
        size = self.head.layout_bytes + self.head.tags_bytes
        if place.at != self._texts or not piece or len(piece) > size - len(self._text):
            raise ValueError(f"piece {place.at} of the text, not piece {self._texts}")
        self._texts += 1
        self._text += piece
        self.received_bytes += len(piece)
        if len(self._text) == size:
            self._begin(now_s)

    def add(self, place: Place, piece: memoryview, source: str, now_s: float) -> None:
        """Takes a part. One that has come is left out. Raises ValueError for a part that its source must not send now,
        and for one whose tag is wrong."""
        number = place.number
        if self.book is None or self.layout is None or self.content is None:
            raise ValueError(f"part {number} before the text")
        if not self.book.is_next(place.seat, place.at, number, source):
            return
        if isinstance(self.content, Whole):
            target = self._memory.memory[self.content.span(number)]
            content.copy(target, piece)
            expected = self._tags[number * TAG_BYTES : (number + 1) * TAG_BYTES]
            if expected and content.tag(target, self.plan.name, number) != expected:
                raise ValueError(f"part {number} has other bytes")
        else:
            if not content.is_intact(piece, self.head.digest, number):
                raise ValueError(f"part {number} has other bytes")
            if self.plan.name:  # others may ask for it, also if this reader was alone
                self.content.add(number, bytes(piece))
            base = None if self._held is None else self._held.memory
            self._is_damaged |= not content.apply(self.layout, self._memory.memory, piece, base)
        self.received_bytes += len(piece)
        self.book.add(place.seat, number, now_s)

    def end(self, piece: memoryview, now_s: float) -> None:
        """Learns how many parts there are. Raises ValueError if others have come."""
        if self.book is None or len(piece) % 8:
            raise ValueError("the number of parts before the text")
        self.book.end([count for (count,) in struct.iter_unpack("<Q", piece)], now_s)
        if isinstance(self.content, Whole) and self.book.parts != self.content.parts:
            raise ValueError(f"{self.book.parts} parts of a state of {self.content.parts}")

    def _begin(self, now_s: float) -> None:
        """Reads the text, and makes room for the state."""
        text, self._tags = bytes(self._text[: self.head.layout_bytes]), bytes(self._text[self.head.layout_bytes :])
        if text:
            layout = Layout.read(text)
            if layout.fingerprint != self.head.layout:
                raise ValueError("its layout is another one than it says")
            if self._held is not None:
                self._held.layout.check(layout, "now", "before")
            pool = Pool(layout.bytes)
        elif self._held is not None:
            layout = self._held.layout
            pool = self._ready_pool or Pool(layout.bytes)
        else:
            raise ValueError("a state without its layout")
        self._memory = Whole(pool.take())
        if self._tags and (not self.is_whole or len(self._tags) != TAG_BYTES * self._memory.parts):
            raise ValueError(f"{len(self._tags)} bytes of tags of a state of {layout.bytes}")
        self.layout, self.pool = layout, pool
        self.content = self._memory if self.is_whole else Code()
        self.book = Book(self.plan.sources, now_s, self.plan.deal)

    def result(self) -> Held | None:
        """The version, once all has come; None: its content is damaged."""
        if self.layout is None or not self.is_complete:
            raise ValueError("an answer that is not complete")
        if not self._is_damaged and content.digest(self.layout, self._memory.memory) == self.head.digest:
            return Held(self.head.version, self.head.digest, self._memory, self.layout)
        return None  # the memory is in nobody's pool: another reader may still be getting it
