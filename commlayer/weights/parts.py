"""`Book`: which parts of a content (`content.py`) have come, and from whom the others do.

Parts belong to seats, each with one source, the publisher or another reader, which sends the seat's parts in an order
of its own. So what has come from a seat is one number, and a source that fails is replaced from there on.
"""

from __future__ import annotations

from collections.abc import Sequence

PUBLISHER = ""
"""A source; the others are addresses of readers."""

PART_MOST_BYTES = 256 << 10
"""Longest part. Heartbeats wait for one of them."""

PART_LEAST_BYTES = 32 << 10
"""Length of the parts of a short content."""

PARTS_ENOUGH = 512
"""A content with more of the shorter parts than this has longer ones."""

TAIL_SHARE, TAIL_LEAST_BYTES = 32, 16 << 10
"""No part is longer than this share of what is left with it, but they have so many bytes: the last parts still pass
from reader to reader when all others have come (guided self-scheduling: Polychronopoulos and Kuck, 1987)."""

GRACE_LEAST_S, GRACE_MOST_S = 3.0, 60.0
GRACE_FACTOR = 16.0
"""A source is late after so many times the usual time between two parts of a source, within these bounds."""

LAG_FACTOR = 2.0
"""Once half of the seats are complete, a source is late after so many times the time of the latest complete one, and
GRACE_LEAST_S more."""


def part_bytes_for(size: int) -> int:
    """The length of the parts of a content that readers give to each other; the same for every reader of it."""
    part_bytes = PART_LEAST_BYTES
    while part_bytes < PART_MOST_BYTES and size > PARTS_ENOUGH * part_bytes:
        part_bytes *= 2
    return part_bytes


def next_bytes(left: float, part_bytes: int) -> int:
    """The length of the next part of a content of which so many bytes are left."""
    return int(min(part_bytes, max(left / TAIL_SHARE, TAIL_LEAST_BYTES)))


def grace_s(took_s: float, parts: int, seats: int) -> float:
    """How long a source may be silent, if all of them, one for each seat, have sent so many parts in that time."""
    usual_s = took_s * seats / parts if parts else GRACE_MOST_S
    return min(max(GRACE_FACTOR * usual_s, GRACE_LEAST_S), GRACE_MOST_S)


def number_of(seat: int, at: int, seats: int) -> int:
    """The part that is number `at` of a seat, without a deal: the seats take turns."""
    return seat + at * seats


class Book:
    """The parts of one content that have come to a reader."""

    def __init__(self, sources: Sequence[str], now_s: float, deal: int = 0) -> None:
        """`sources`: of each seat. `now_s`: the time, of any clock, from which on parts are awaited. `deal`: see
        `message.Plan`."""
        self.sources, self.deal = list(sources), deal
        self.come: list[list[int]] = [[] for _ in self.sources]
        """The parts of each seat, in their order."""
        self._has: set[int] = set()
        self.counts: list[int] | None = None
        """How many parts each seat has; None: that is not known yet."""
        self._begin_s = self._last_s = now_s
        self._heard_s = [now_s] * len(self.sources)
        self._complete_s: list[float] = []
        """The times at which seats were complete."""

    @property
    def parts(self) -> int | None:
        """The number of all parts, once it is known."""
        return None if self.counts is None else sum(self.counts)

    @property
    def is_complete(self) -> bool:
        """Whether all parts have come."""
        return self.parts == len(self._has)

    def has(self, number: int) -> bool:
        """Whether this part has come."""
        return number in self._has

    def is_next(self, seat: int, at: int, number: int, source: str) -> bool:
        """Whether part `number`, which is number `at` of its seat, must be taken. False: it has come, or its seat has
        another source by now.

        Raises ValueError if the source of its seat sends it out of turn, or for a part of another seat.
        """
        if not seat < len(self.sources) or (self.counts is not None and not at < self.counts[seat]):
            raise ValueError(f"part {at} of seat {seat}")
        come, is_present = len(self.come[seat]), source == self.sources[seat]
        if at > come and is_present:
            raise ValueError(f"part {at} of seat {seat}, not part {come}")
        if not self.deal and number != number_of(seat, at, len(self.sources)):
            raise ValueError(f"part {number}, which is not part {at} of seat {seat}")
        if at == come and is_present and number in self._has:
            raise ValueError(f"part {number} as part {at} of seat {seat}, and of another one before")
        return at == come and number not in self._has

    def add(self, seat: int, number: int, now_s: float) -> None:
        """A part that `is_next` has come."""
        self.come[seat].append(number)
        self._has.add(number)
        self._last_s = self._heard_s[seat] = now_s
        if self.counts is not None and not self._lacks(seat):
            self._complete_s.append(now_s)

    def end(self, counts: Sequence[int], now_s: float) -> None:
        """There are so many parts of each seat. Raises ValueError if more have come."""
        if len(counts) != len(self.sources) or any(map(lambda count, come: count < len(come), counts, self.come)):
            raise ValueError(f"{counts} parts of the seats, of which {list(map(len, self.come))} have come")
        self.counts = list(counts)
        self._complete_s = [now_s for seat in range(len(counts)) if not self._lacks(seat)]

    def open_seats(self, source: str | None = None) -> list[int]:
        """The seats from which parts are missing, or may be; those of one source, or of all readers."""
        return [
            seat
            for seat, its in enumerate(self.sources)
            if (its != PUBLISHER if source is None else its == source) and self._lacks(seat)
        ]

    def _lacks(self, seat: int) -> bool:
        return self.counts is None or len(self.come[seat]) < self.counts[seat]

    def turn_to_publisher(self, seat: int) -> None:
        """The publisher is the source of a seat's missing parts from now on."""
        self.sources[seat] = PUBLISHER

    def late(self, now_s: float) -> list[int]:
        """The seats whose readers have sent nothing for too long, or send much slower than the others. Nobody is late
        before the parts are counted: one that got none to send is silent, too."""
        if self.counts is None:
            return []
        limit_s = grace_s(self._last_s - self._begin_s, len(self._has), len(self.sources))
        is_lag = False
        if 2 * len(self._complete_s) >= len(self.sources):
            lag_s = LAG_FACTOR * (max(self._complete_s, default=now_s) - self._begin_s) + GRACE_LEAST_S
            is_lag = now_s - self._begin_s > lag_s
        return [seat for seat in self.open_seats() if is_lag or now_s - self._heard_s[seat] > limit_s]
