"""`Pace`: how long syncs take beside their turns, from which H follows while a training with `every="auto"` goes on."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence

from .site import Site
from .sync import Head
from .turns import EVERY_MAX, Turns

WINDOW = 16
"""Turns after which all sites look whether H fits."""
WAITED = 0.1
"""The share of its time that a site may wait for syncs. From H = 8 to 16, a tenth more of H costs 1.2 % more steps to a
loss, from 16 to 32 2.4 % (docs/local_bench.md). But H grows by multiples of the fragments, as from 8 to 12, which
shorter waits are not worth."""
USED = 0.6
"""The share of a turn within which its sync ends if the turn is too long."""
ROOM = 1.25
"""How much longer than its sync such a turn becomes."""
REST = 0.1
"""The share of syncs, the longest ones, that `USED` ignores."""
FACTOR = 2
"""The most by which H changes at once."""

log = logging.getLogger("commlayer")


class Pace:
    """This rank's look at its syncs. `follows`: whether H changes."""

    def __init__(self, turns: Turns, *, follows: bool) -> None:
        self.turns, self.follows = turns, follows
        self.changes: list[tuple[int, int]] = []
        """The turns from which on there was another H, and this H."""
        self._begin()

    def _begin(self) -> None:
        """A window begins."""
        self._since_s, self._waited_s = time.perf_counter(), 0.0
        self._used: dict[int, float] = {}  # by turn

    def see(self, turn: int, age: int) -> None:
        """Notes, once for each turn, how many local steps its sync took."""
        self._used.setdefault(turn, age / self.turns.length(turn + 1))

    @contextlib.contextmanager
    def waiting(self, turn: int) -> Iterator[None]:
        """A context in which the loop waits for the sync of a turn."""
        begin_s = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - begin_s
        self._used.setdefault(turn, 1.0)

    def tell(self, head: Head, site: Site) -> Head:
        """The head of the next sync, with what this site tells the others of its syncs. All its ranks call."""
        turns = self.turns
        head = head._replace(every=turns.every, since_turn=turns.since_turn, since_step=turns.since_step)
        if not self.follows or head.turn <= turns.since_turn or (head.turn - turns.since_turn) % WINDOW:
            return head
        waited = self._waited_s / max(time.perf_counter() - self._since_s, 1e-9)
        used = sorted(self._used.values())
        if len(used) < WINDOW - 1 or head.is_leaving:  # the window began with a restore, or a join
            waited, used = 0.0, [1.0]
        self._begin()
        least, most = site.largest([-waited, used[math.ceil(len(used) * (1 - REST)) - 1]])
        return head._replace(waited=-least, used=most)

    def end(self, heads: Sequence[Head], *, logs: bool) -> None:
        """A sync has ended, with the heads of all sites. All compute the same new turns; a site that joins takes them
        from the others. `logs`: whether this rank logs a change."""
        known = [head for head in heads if head.every and not head.is_listening]
        if not self.follows or not known:
            return
        every, turn = known[0].every, known[0].turn
        turns = self.turns.changed(every, known[0].since_turn, known[0].since_step)
        waited, used = min(head.waited for head in known), max(head.used for head in known)
        following = following_every(every, turns.fragments, waited, used)
        if following != every:
            turns = turns.changed(following, turn + 1, turns.steps(turn + 1))
            self.changes.append((turn + 1, following))
            if logs:
                log.info(
                    "LocalSteps: H was %d and is %d from sync %d on: each site waited for syncs for at least %.0f %% "
                    "of the time, and nine of ten syncs took at most %.0f %% of a turn",
                    every, following, turn + 1, 100 * waited, 100 * used,
                )  # fmt: skip
        if turns != self.turns:
            self.turns = turns
            self._begin()

    def __str__(self) -> str:
        found = ", ".join(f"{every} from sync {turn} on" for turn, every in self.changes)
        return f"H has followed the times of syncs: {found}"


def following_every(every: int, fragments: int, waited: float, used: float) -> int:
    """The H that follows `every`, both in steps. A new H gives all turns the same length.

    `waited` is the share of its time that the site waited for syncs which waited least, so that the waits are those for
    the network, and not for a slow site. If each sync takes S seconds and each turn T < S, it is 1 - T / S, and turns
    of S seconds need H / (1 - `waited`) steps. `used` is the share of a turn within which syncs ended, on the site
    where they took longest.
    """
    if waited > WAITED:
        factor = 1 / max(1 - waited, 1 / FACTOR)
    elif used <= USED:
        factor = max(used * ROOM, 1 / FACTOR)
    else:
        return every
    steps = math.ceil(every * factor / fragments)  # of each turn
    return max(fragments * min(steps, EVERY_MAX // fragments), 2)
