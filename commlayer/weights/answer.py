"""An answer on its way, in parts: `Departure` at the publisher, `Arrival` at a reader.

The parts are short, so that heartbeats pass between them and a connection with a slow link is no silent one. Few are in
the queue of a connection at a time, so a reader that joins costs the publisher little memory.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import content
from .held import Held, Pool
from .layout import Layout
from .message import DIFFERENCE, PART, TEXT, WHOLE, Head, Plan
from .parts import PART_MOST_BYTES, PUBLISHER, Book, Cut

_PLACE = struct.Struct("<QQ")
"""The place of a part: the number of the question, and its own number in the text or in the content."""


def part(request: int, number: int, cut: Cut, block: memoryview) -> list[Any]:
    """The message with one part of a content."""
    return [PART, _PLACE.pack(request, number), block[cut.span(number)]]


class Departure:
    """An answer that leaves: its head, then the text, and the parts of the content that the publisher gives."""

    def __init__(self, kind: bytes, head: Head, plan: Plan, text: bytes, block: Any, held: Held | None) -> None:
        self.head, self.plan = head, plan
        self.held = held
        """The version whose memory it sends; None for a difference."""
        self.blamed: set[int] = set()
        """The seats whose readers have failed."""
        self._cut, self._block = Cut(head.code_bytes, plan.part_bytes), memoryview(block)
        self._queue: deque[Iterator[list[Any]]] = deque([self._opening(kind, text)])
        for seat, source in enumerate(plan.sources):
            if source == PUBLISHER:
                self._queue.append(self._seat(seat, 0))
        self.message: list[Any] | None = None
        """What leaves next; None: all of it has left."""
        self.advance()

    @property
    def lasts(self) -> bool:
        """Whether it must stay after all has left: parts that other readers lack may be asked of it."""
        return self.plan.is_shared

    def advance(self) -> None:
        """Takes the next message."""
        self.message = None
        while self._queue and self.message is None:
            self.message = next(self._queue[0], None)
            if self.message is None:
                self._queue.popleft()

    def give(self, seat: int, at: int) -> None:
        """Sends a seat's parts from its part number `at` on, too."""
        self._queue.append(self._seat(seat, at))
        if self.message is None:
            self.advance()

    def _opening(self, kind: bytes, text: bytes) -> Iterator[list[Any]]:
        yield [kind, self.head.text(), self.plan.text()]
        whole, cut = memoryview(text), Cut(len(text), PART_MOST_BYTES)
        for number in range(cut.parts):
            yield [TEXT, _PLACE.pack(self.head.request, number), whole[cut.span(number)]]

    def _seat(self, seat: int, at: int) -> Iterator[list[Any]]:
        seats = len(self.plan.sources)
        for number in range(seat + at * seats, self._cut.parts, seats):
            yield part(self.head.request, number, self._cut, self._block)


class Arrival:
    """An answer that comes. Its content lies in memory of its own, which is none of a version before the digest says
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
        self.block: Tensor | None = None
        """The state, or the code of the difference."""
        self._held = held
        self._ready_pool = pool
        self._text, self._text_parts = bytearray(), 0
        self._tags = b""
        if held is None or held.layout.fingerprint != head.layout or head.layout_bytes:
            if not self.is_whole:
                raise ValueError(f"a difference to version {head.base}, of another layout")
            if head.layout_bytes <= 0:
                raise ValueError("a state without its layout")
        elif not 0 <= head.code_bytes <= held.layout.bytes:
            raise ValueError(f"{head.code_bytes} bytes of a state of {held.layout.bytes}")
        self._cut = Cut(max(head.code_bytes, 0), plan.part_bytes)
        self._tags_bytes = self._cut.parts * content.TAG_BYTES if plan.is_shared else 0
        if not head.layout_bytes + self._tags_bytes:
            self._begin(now_s)

    @property
    def is_complete(self) -> bool:
        """Whether all of it has come."""
        return self.book is not None and self.book.is_complete

    def is_own(self, place: bytes) -> bool:
        """Whether a part belongs to this answer, not to an earlier one. Raises ValueError for a place that is none."""
        if len(place) != _PLACE.size:
            raise ValueError("a part without its place")
        return bool(_PLACE.unpack(place)[0] == self.head.request)

    def add_text(self, place: bytes, piece: memoryview, now_s: float) -> None:
        """Takes a piece of the text. Raises ValueError for one that does not come next, and MismatchError if it
        completes a layout with other tensors than those of the version that is held."""
        number = _PLACE.unpack(place)[1]
        size = self.head.layout_bytes + self._tags_bytes
        if number != self._text_parts or not piece or len(piece) > size - len(self._text):
            raise ValueError(f"piece {number} of the text, not piece {self._text_parts}")
        self._text_parts += 1
        self._text += piece
        if len(self._text) == size:
            self._begin(now_s)

    def add(self, place: bytes, piece: memoryview, source: str, now_s: float) -> None:
        """Takes a part. One that has come is left out. Raises ValueError for a part that its source must not send now,
        and for one whose tag is wrong."""
        number = _PLACE.unpack(place)[1]
        if self.book is None or self.block is None:
            raise ValueError(f"part {number} before the text")
        if not self.book.is_next(number, source):
            return
        span = self._cut.span(number)
        content.copy(self.block[span], piece)
        if self._tags:
            tag = self._tags[number * content.TAG_BYTES : (number + 1) * content.TAG_BYTES]
            if content.tags(self.block[span], self._cut.part_bytes) != tag:
                raise ValueError(f"part {number} has other bytes")
        self.book.add(number, now_s)

    def _begin(self, now_s: float) -> None:
        """Reads the text, and makes room for the content."""
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
        size = self.head.code_bytes
        if size != layout.bytes if self.is_whole else not 0 <= size <= layout.bytes:
            raise ValueError(f"{size} bytes of a state of {layout.bytes}")
        self.layout, self.pool = layout, pool
        self.block = pool.take() if self.is_whole else torch.empty(size, dtype=torch.uint8)
        self.book = Book(self._cut, self.plan.sources, now_s)

    def result(self) -> Held | None:
        """The version, once all has come; None: its content is damaged."""
        if self.layout is None or self.pool is None or self.block is None:
            raise ValueError("an answer that is not complete")
        memory, is_good = self.block, True
        if self._held is not None and not self.is_whole:
            memory = self.pool.take()
            content.copy(memory, self._held.memory)
            is_good = content.apply(self.layout, memory, self.block.numpy().data)
        if is_good and content.digest(self.layout, memory) == self.head.digest:
            return Held(self.head.version, self.head.digest, memory, self.layout)
        return None  # the memory is in nobody's pool: another reader may still be getting it
