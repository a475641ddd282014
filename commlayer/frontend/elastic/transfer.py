"""A state on its way to a member that listens: in pieces, in the least urgent class, while all train.

Both ends keep some pieces in flight, and start more at each step, and while they wait for its average. So a transfer
needs no thread. After a regrouping it goes on in the new WORLD, from the first piece that the receiver lacks.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..work.context import labelled, priority
from .packing import Packing

LEAST_CLASS = 7

PIECE_BYTES = 8 << 20

IN_FLIGHT = 32
"""The most pieces that are started before the first of them has ended."""

TAG = 1 << 29
"""Messages of transfers have this tag and those above."""


class Sending:
    """A state that leaves for a member. `serial`: the number of the transfer, the same at both ends."""

    def __init__(self, state: Packing, serial: int) -> None:
        self.serial = serial
        self._state = state
        self._pieces: list[Tensor] = []
        self._next = 0
        self._works: deque[Any] = deque()
        self._to = 0

    def resume(self, to: int, received: int) -> None:
        """Goes on in a new WORLD, in which the receiver has the rank `to` and so many pieces."""
        self._to, self._next = to, received
        self._works.clear()

    def pump(self) -> None:
        """Starts what may be in flight. Raises the errors of messages."""
        if not self._pieces:
            if not self._state.is_done:
                return
            packed = self._state.packed()
            self._pieces = [torch.tensor([packed.numel()]), *packed.split(PIECE_BYTES)]
        _settle(self._works)
        with priority(LEAST_CLASS), labelled("state for a rank that joins"):
            while self._next < len(self._pieces) and len(self._works) < IN_FLIGHT:
                self._works.append(dist.isend(self._pieces[self._next], self._to, tag=TAG + self._next))
                self._next += 1


class Receiving:
    """A state that comes from a member."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.received = 0
        """Pieces that are here, the first of which is the size of the state."""
        self._size = torch.zeros(1, dtype=torch.int64)
        self._pieces: list[Tensor] = [self._size]
        self._state: Tensor | None = None
        self._works: deque[Any] = deque()
        self._source = 0

    def resume(self, source: int) -> None:
        """Goes on in a new WORLD, in which the sender has this rank."""
        self._source = source
        self._works.clear()

    def pump(self, *, waits: bool = False) -> Tensor | None:
        """Takes what has come; the state once it is complete. `waits`: first waits for the oldest piece in flight.
        Raises the errors of messages."""
        if waits and self._works:
            self._works[0].wait()
        self.received += _settle(self._works)
        if self.received > 0 and self._state is None:
            self._state = torch.empty(int(self._size), dtype=torch.uint8)
            self._pieces += self._state.split(PIECE_BYTES)
        while len(self._works) < IN_FLIGHT and (due := self.received + len(self._works)) < len(self._pieces):
            self._works.append(dist.irecv(self._pieces[due], self._source, tag=TAG + due))
        return self._state if self.received == len(self._pieces) and self._state is not None else None


def _settle(works: deque[Any]) -> int:
    """Takes the messages away that have ended, in their order; how many. Raises their errors."""
    ended = 0
    while works and works[0].is_completed():
        works[0].wait()
        works.popleft()
        ended += 1
    return ended
