"""A state on its way to a member that listens: in pieces, in the least urgent class, while all train.

Both ends keep some pieces in flight, and start more at each step, and while they wait for its average. So a transfer
needs no thread. After a regrouping it goes on in the new group, from the first piece that the receiver lacks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..work.context import labelled, priority
from .packing import Packing
from .party import Party

LEAST_CLASS = 7

PIECE_BYTES = 8 << 20

IN_FLIGHT = 32
"""The most pieces that are started before the first of them has ended."""

TAG = 1 << 29
"""Messages of transfers have this tag and those above."""


class Sending:
    """A state that leaves for a member. `serial`: the number of the transfer, the same at both ends."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.state: Packing | None = None
        """None: it is not packed yet."""
        self._pieces: list[Tensor] = []
        self._next = 0
        self._works: deque[Any] = deque()
        self._group: Any = None
        self._to = 0

    def resume(self, group: Any, to: int, received: int) -> None:
        """Goes on in a new group, in which the receiver has the rank `to` and so many pieces."""
        self._group, self._to, self._next = group, to, received
        self._works.clear()

    def pump(self) -> None:
        """Starts what may be in flight. Raises the errors of messages."""
        if not self._pieces:
            if self.state is None or not self.state.is_done:
                return
            packed = self.state.packed()
            self._pieces = [torch.tensor([packed.numel()], dtype=torch.int64, device="cpu"), *packed.split(PIECE_BYTES)]
        _settle(self._works)
        with priority(LEAST_CLASS), labelled("state for a rank that joins"):
            while self._next < len(self._pieces) and len(self._works) < IN_FLIGHT:
                self._works.append(self._group.send([self._pieces[self._next]], self._to, TAG + self._next))
                self._next += 1


class Receiving:
    """A state that comes from a member."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.received = 0
        """Pieces that are here, the first of which is the size of the state."""
        self._size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._pieces: list[Tensor] = [self._size]
        self._state: Tensor | None = None
        self._works: deque[Any] = deque()
        self._group: Any = None
        self._source = 0

    def resume(self, group: Any, source: int) -> None:
        """Goes on in a new group, in which the sender has this rank."""
        self._group, self._source = group, source
        self._works.clear()

    def pump(self, *, waits: bool = False) -> Tensor | None:
        """Takes what has come; the state once it is complete. `waits`: first waits for the oldest piece in flight.
        Raises the errors of messages."""
        if waits and self._works:
            self._works[0].wait()
        self.received += _settle(self._works)
        if self.received > 0 and self._state is None:
            self._state = torch.empty(int(self._size), dtype=torch.uint8, device="cpu")
            self._pieces += self._state.split(PIECE_BYTES)
        while len(self._works) < IN_FLIGHT and (due := self.received + len(self._works)) < len(self._pieces):
            self._works.append(self._group.recv([self._pieces[due]], self._source, TAG + due))
        return self._state if self.received == len(self._pieces) and self._state is not None else None


class Transfers:
    """Those of a member of a party. `pack` returns its state."""

    def __init__(self, pack: Callable[[], Packing]) -> None:
        self.sendings: dict[int, Sending] = {}
        """By the member that gets the state."""
        self.receiving: Receiving | None = None
        self._source = -1
        self._pack = pack
        self._packing: Packing | None = None
        """The latest state: it must be whole before the next step changes it."""

    def listen(self) -> None:
        """This member lacks the state, and none is on its way to it."""
        self._source, self.receiving = -1, None

    def report(self) -> dict[str, Any]:
        """What the other members of a new group must know, for `match`."""
        receiving = self.receiving
        return {
            "receives": None if receiving is None else (self._source, receiving.serial, receiving.received),
            "sends": {to: each.serial for to, each in self.sendings.items()},
        }

    def match(
        self,
        party: Party,
        group: Any,
        givers: Sequence[int],
        lacking: Collection[int],
        reports: Mapping[int, Mapping[str, Any]],
    ) -> bool:
        """In a new group each member that is `lacking` the state gets it from one of the `givers`: the same as before,
        if that is there. All call, with the reports of all. Returns whether a state comes here from its beginning."""
        members = party.members
        sendings, self.sendings = self.sendings, {}
        begins = False
        for count, member in enumerate(sorted(lacking) if givers else ()):
            source, serial, received = reports[member]["receives"] or (-1, -1, 0)
            is_new = source not in givers or reports[source]["sends"].get(member) != serial
            if is_new:
                source, received = givers[count % len(givers)], 0
            if party.own == source:
                self.sendings[member] = Sending(party.generation) if is_new else sendings[member]
                self.sendings[member].resume(group, members.index(member), received)
            elif party.own == member:
                begins = is_new or self.receiving is None
                if is_new or self.receiving is None:
                    self._source, self.receiving = source, Receiving(party.generation)
                self.receiving.resume(group, members.index(source))
        return begins

    def pack(self) -> None:
        """Begins to copy the state for those that are to get it from its beginning. The state must stay as it is until
        `finish_packing`."""
        new = [each for each in self.sendings.values() if each.state is None]
        if new:
            self.finish_packing()  # an earlier one
            self._packing = self._pack()
            for each in new:
                each.state = self._packing

    def finish_packing(self) -> None:
        """Before a step changes the state."""
        if self._packing is not None:
            self._packing.packed()
            self._packing = None

    def send(self) -> None:
        """Starts what may be in flight."""
        for each in self.sendings.values():
            each.pump()

    def forget(self, listening: Collection[int]) -> None:
        """Only these members still lack the state."""
        self.sendings = {to: each for to, each in self.sendings.items() if to in listening}


def _settle(works: deque[Any]) -> int:
    """Takes the messages away that have ended, in their order; how many. Raises their errors."""
    ended = 0
    while works and works[0].is_completed():
        works[0].wait()
        works.popleft()
        ended += 1
    return ended
