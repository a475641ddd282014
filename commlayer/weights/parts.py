"""`Book`: which parts of a content have come, and from whom the others do.

The parts are dealt to seats: part `n` belongs to seat `n % seats`. A seat has one source, the publisher or another
reader, which sends the seat's parts in their order. So what has come from a seat is one number, and a source that fails
is replaced from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PUBLISHER = ""
"""A source; the others are addresses of readers."""

PART_MOST_BYTES = 256 << 10
"""Longest part. Heartbeats wait for one of them."""

PART_LEAST_BYTES = 64 << 10
"""Length of the parts of a short content: the last ones pass from reader to reader when all others have come."""

PARTS_ENOUGH = 512
"""A content with more of the shorter parts than this has longer ones."""

GRACE_LEAST_S, GRACE_MOST_S = 3.0, 60.0
GRACE_FACTOR = 8.0
"""A source is late after so many times the usual time between two parts of a source, within these bounds."""

LAG_FACTOR = 2.0
"""Once half of the seats are complete, a source is late after so many times the time of the latest complete one, and
GRACE_LEAST_S more."""


class Cut(NamedTuple):
    """How a content is cut into parts."""

    size: int
    """Bytes of the content."""
    part_bytes: int

    @property
    def parts(self) -> int:
        """The number of parts."""
        return -(-self.size // self.part_bytes)

    def span(self, number: int) -> slice:
        """The place of a part in the content."""
        return slice(number * self.part_bytes, min((number + 1) * self.part_bytes, self.size))


def part_bytes_for(size: int) -> int:
    """The length of the parts of a content that readers give to each other; the same for every reader of it."""
    part_bytes = PART_LEAST_BYTES
    while part_bytes < PART_MOST_BYTES and size > PARTS_ENOUGH * part_bytes:
        part_bytes *= 2
    return part_bytes


class Book:
    """The parts of one content, at a reader."""

    def __init__(self, cut: Cut, sources: Sequence[str], now_s: float) -> None:
        """`sources`: of each seat. `now_s`: the time, of any clock, from which on parts are awaited."""
        self.cut = cut
        self.sources = list(sources)
        self._come = [0] * len(self.sources)
        self._begin_s = self._last_s = now_s
        self._heard_s = [now_s] * len(self.sources)
        self._complete_s: list[float] = []
        """The times at which seats were complete."""

    @property
    def is_complete(self) -> bool:
        """Whether all parts have come."""
        return sum(self._come) == self.cut.parts

    def has(self, number: int) -> bool:
        """Whether this part has come."""
        turn, seat = divmod(number, len(self.sources))
        return self._come[seat] > turn

    def at(self, seat: int) -> int:
        """How many parts of a seat have come."""
        return self._come[seat]

    def is_next(self, number: int, source: str) -> bool:
        """Whether a part must be taken. False: it has come, or its seat has another source by now.

        Raises ValueError if the source of its seat sends it out of turn.
        """
        if not 0 <= number < self.cut.parts:
            raise ValueError(f"part {number} of {self.cut.parts}")
        turn, seat = divmod(number, len(self.sources))
        if turn > self._come[seat] and source == self.sources[seat]:
            raise ValueError(f"part {number}, not part {seat + self._come[seat] * len(self.sources)}")
        return turn == self._come[seat]

    def add(self, number: int, now_s: float) -> None:
        """A part that `is_next` has come."""
        seat = number % len(self.sources)
        self._come[seat] += 1
        self._last_s = self._heard_s[seat] = now_s
        if not self._lacks(seat):
            self._complete_s.append(now_s)

    def open_seats(self, source: str | None = None) -> list[int]:
        """The seats from which parts are missing; those of one source, or of all readers."""
        return [
            seat
            for seat, its in enumerate(self.sources)
            if (its != PUBLISHER if source is None else its == source) and self._lacks(seat)
        ]

    def _lacks(self, seat: int) -> bool:
        return seat + self._come[seat] * len(self.sources) < self.cut.parts

    def turn_to_publisher(self, seat: int) -> None:
        """The publisher is the source of a seat's missing parts from now on."""
        self.sources[seat] = PUBLISHER

    def late(self, now_s: float) -> list[int]:
        """The seats whose readers have sent nothing for too long, or send much slower than the others."""
        come, grace_s = sum(self._come), GRACE_MOST_S
        if come:
            usual_s = (self._last_s - self._begin_s) * len(self.sources) / come
            grace_s = min(max(GRACE_FACTOR * usual_s, GRACE_LEAST_S), GRACE_MOST_S)
        is_lag = False
        if 2 * len(self._complete_s) >= min(len(self.sources), self.cut.parts):
            lag_s = LAG_FACTOR * (max(self._complete_s, default=now_s) - self._begin_s) + GRACE_LEAST_S
            is_lag = now_s - self._begin_s > lag_s
        return [seat for seat in self.open_seats() if is_lag or now_s - self._heard_s[seat] > grace_s]
