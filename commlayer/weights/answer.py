"""An answer on its way, in parts: `Departure` at the publisher, `Arrival` at a reader.

The parts are short, so that heartbeats pass between them and a connection with a slow link is no silent one. Few are in
the queue of a connection at a time, so a reader that joins costs the publisher little memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import content
from .held import Held, Pool
from .layout import Layout
from .message import DIFFERENCE, PART, PART_BYTES, WHOLE, Head

_PLACE = struct.Struct("<QQ")
"""The place of a part: the number of the question, and its own number in the answer."""


class Departure:
    """An answer that leaves: its head, then the text of the layout and the content, in parts."""

    def __init__(self, kind: bytes, head: Head, layout_text: bytes, code: Any, held: Held | None) -> None:
        self.held = held
        """The version whose memory it sends; None for a difference."""
        self._request = head.request
        self._messages = self._made(kind, head, (layout_text, code))
        self.message: list[Any] | None = next(self._messages)
        """What leaves next; None: all of it has left."""

    def advance(self) -> None:
        """Takes the next message."""
        self.message = next(self._messages, None)

    def _made(self, kind: bytes, head: Head, blocks: tuple[Any, ...]) -> Iterator[list[Any]]:
        yield [kind, head.text(), b""]
        number = 0
        for block in blocks:
            view = memoryview(block)
            for at in range(0, len(view), PART_BYTES):
                yield [PART, _PLACE.pack(self._request, number), view[at : at + PART_BYTES]]
                number += 1


class Arrival:
    """An answer that comes. Its content lies in memory of its own, which is none of a version before the digest says
    so."""

    def __init__(self, kind: bytes, head: Head, held: Held | None, pool: Pool | None) -> None:
        """`held`, `pool`: the version that the reader holds, and the blocks for others of its layout. Raises ValueError
        for a head that is none of this kind."""
        if kind not in (WHOLE, DIFFERENCE):
            raise ValueError(f"a message of kind {kind!r:.40}")
        self.head = head
        self.is_whole = kind == WHOLE
        self.layout: Layout | None = None
        self.pool: Pool | None = None
        """Blocks for versions of this layout."""
        self._held, self._parts, self._at = held, 0, 0
        self._text = bytearray()
        self._block: Tensor | None = None
        """The state, or the code of the difference."""
        if held is not None and held.layout.fingerprint == head.layout and not head.layout_bytes:
            self._begin(held.layout, pool or Pool(held.layout.bytes))
        elif not self.is_whole:
            raise ValueError(f"a difference to version {head.base}, of another layout")
        elif head.layout_bytes <= 0:
            raise ValueError("a state without its layout")

    @property
    def is_complete(self) -> bool:
        """Whether all of it has come."""
        return self._block is not None and self._at == self.head.code_bytes

    def add(self, place: bytes, part: memoryview) -> None:
        """Takes a part; one of another answer is left out. Raises ValueError for one that does not come next, and
        MismatchError if it completes a layout with other tensors than those of the version that is held."""
        if len(place) != _PLACE.size:
            raise ValueError("a part without its place")
        request, number = _PLACE.unpack(place)
        if request != self.head.request:
            return
        if number != self._parts or not part or self.is_complete:
            raise ValueError(f"part {number}, not part {self._parts}")
        self._parts += 1
        if self._block is not None:
            if len(part) > len(self._block) - self._at:
                raise ValueError(f"more than {self.head.code_bytes} bytes")
            content.copy(self._block[self._at : self._at + len(part)], part)
            self._at += len(part)
            return
        self._text += part
        if len(self._text) > self.head.layout_bytes:
            raise ValueError(f"a layout of more than {self.head.layout_bytes} bytes")
        if len(self._text) == self.head.layout_bytes:
            layout = Layout.read(bytes(self._text))
            if layout.fingerprint != self.head.layout:
                raise ValueError("its layout is another one than it says")
            if self._held is not None:
                self._held.layout.check(layout, "now", "before")
            self._begin(layout, Pool(layout.bytes))

    def _begin(self, layout: Layout, pool: Pool) -> None:
        """Makes room for the content."""
        size = self.head.code_bytes
        if size != layout.bytes if self.is_whole else not 0 <= size <= layout.bytes:
            raise ValueError(f"{size} bytes of a state of {layout.bytes}")
        self.layout, self.pool = layout, pool
        self._block = pool.take() if self.is_whole else torch.empty(size, dtype=torch.uint8)

    def result(self) -> Held | None:
        """The version, once all has come; None: its content is damaged."""
        if self.layout is None or self.pool is None or self._block is None:
            raise ValueError("an answer that is not complete")
        memory, is_good = self._block, True
        if self._held is not None and not self.is_whole:
            memory = self.pool.take()
            content.copy(memory, self._held.memory)
            is_good = content.apply(self.layout, memory, self._block.numpy().data)
        if is_good and content.digest(self.layout, memory) == self.head.digest:
            return Held(self.head.version, self.head.digest, memory, self.layout)
        self.pool.give(memory)
        return None
