"""`Deal`: which parts of a content the publisher has given to which seat of a group of readers.

Each part goes to the first seat with room. A seat has room while few of its parts are on their way through its reader:
so one that is fast, or whose link is, gets more parts than one that is slow, and all end at about one time. Flows that
share a link with equal windows also share its rate equally, which TCP alone does not do for short ones. A seat whose
parts do not move takes none from the others.
"""

from __future__ import annotations

from .content import Content
from .parts import grace_s

WINDOW_SHARE, WINDOW_LEAST = 4, 2
"""At most this share of what is left for each seat is on its way through one, or so many parts (guided
self-scheduling: Polychronopoulos and Kuck, 1987)."""

WINDOW_LEAST_BYTES, SMALL_SHARE = 128 << 10, 64
"""So many bytes may always be on their way, but no more than this share of a content: a part comes to a reader, goes
on, and its news comes back, each behind a full queue of a switch. With less, the publisher's link is idle meanwhile."""

BESIDE_MOST, BESIDE_MOST_BYTES = 2 * WINDOW_LEAST, 2 * WINDOW_LEAST_BYTES
"""So many parts of all seats, or so many bytes, may be on their way beside a training: others would wait in front of
the training's packets. With these the link of the publisher is full while its readers pass parts on. One seat has half
of them at most, so that one reader that is stuck does not stop the others."""


class Deal:
    """Belongs to the thread that serves."""

    def __init__(self, content: Content, seats: int, now_s: float) -> None:
        """`now_s`: the time, of the clock of `look`."""
        self._content = content
        self.given: list[list[int]] = [[] for _ in range(seats)]
        """The parts of each seat, in their order."""
        self._ends = [[0] for _ in range(seats)]
        """The bytes of a seat's first parts, by their number."""
        self._passed = [0] * seats
        """How many of them have passed through its reader, or were given up."""
        self._begin_s = self._last_s = self._given_up_s = now_s
        self._seen = [(0, now_s)] * seats
        """How many had passed, and since when that is so, or parts are on their way."""
        self._here = set(range(seats))
        """The seats whose readers are connected."""
        self._trusted = set(range(seats))
        """Those of them that have failed nobody, or, if there are none, all."""
        self._next = 0
        self.is_beside = False
        """Whether training uses the link, too."""

    @property
    def is_ended(self) -> bool:
        """Whether all parts are given."""
        return self._content.is_ended and self._next == self._content.parts

    def next(self, seat: int) -> int | None:
        """The part that the seat gets next; None: none now."""
        is_here = seat in self._trusted and self._next < self._content.parts
        return self._next if is_here and self._has_room(seat) else None

    def _on_way(self, seat: int) -> int:
        return len(self.given[seat]) - self._passed[seat]

    def _on_way_bytes(self, seat: int) -> int:
        return self._ends[seat][-1] - self._ends[seat][self._passed[seat]]

    def _has_room(self, seat: int) -> bool:
        most = WINDOW_LEAST
        if self.is_beside:
            parts, size = (sum(map(count, self._trusted)) for count in (self._on_way, self._on_way_bytes))
            if parts >= BESIDE_MOST and size >= BESIDE_MOST_BYTES:
                return False
        elif not self._content.is_ended:
            most = 2 * WINDOW_LEAST  # what is left is not known
        else:
            most = max(WINDOW_LEAST, (self._content.parts - self._next) // (WINDOW_SHARE * len(self.given)))
        least_bytes = min(WINDOW_LEAST_BYTES, self._content.size // SMALL_SHARE)
        return self._on_way(seat) < most or self._on_way_bytes(seat) < least_bytes

    def give(self, seat: int) -> None:
        """The seat gets the next part."""
        self.given[seat].append(self._next)
        self._ends[seat].append(self._ends[seat][-1] + len(self._content.part(self._next)))
        self._next += 1

    def passed(self, seat: int, count: int) -> None:
        """So many parts of a seat have passed through its reader: of those that it was given, whatever it says."""
        self._passed[seat] = max(self._passed[seat], min(count, len(self.given[seat])))

    def look(self, now_s: float) -> None:
        """Gives up the parts of seats that have not moved for the grace time: they wait for a reader that takes or
        passes none. Its seat is the last that gets others."""
        limit_s = grace_s(self._last_s - self._begin_s, sum(self._passed), len(self.given))
        for seat, (passed, since_s) in enumerate(self._seen):
            if passed != self._passed[seat]:
                self._last_s = now_s
            elif self._on_way(seat):
                if now_s - since_s <= limit_s:
                    continue
                self._passed[seat] = len(self.given[seat])
                self._given_up_s = now_s
                self.distrust(seat)
            self._seen[seat] = self._passed[seat], now_s
        stands = now_s - max(self._last_s, self._given_up_s) > limit_s and not any(map(self._on_way, self._trusted))
        if stands and not self.is_ended:  # those that are left take nothing: some that were given up may live
            self._trusted = set(self._here)

    def distrust(self, seat: int) -> None:
        """The seat's reader has failed another one."""
        self._trusted.discard(seat)
        self._trusted = self._trusted or set(self._here)

    def leave(self, seat: int) -> None:
        """The seat's reader has gone."""
        self._here.discard(seat)
        self.distrust(seat)
