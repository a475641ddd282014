"""The ranks' shares of a batch, by their measured speeds."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

from ...planner.spread import even

WORTH = 1.05
"""Other shares must shorten the slowest rank's time by this factor, or the present ones stay."""

WINDOW = 10
"""Steps over which a speed is measured, and between two changes of the shares."""


def shares(speeds: Sequence[float], total: int) -> tuple[int, ...]:
    """The samples of each rank, `total` together, with the least time of the slowest one.

    `speeds`: samples per second; 0: unknown, taken for the mean of the others. A rank gets no sample only if there are
    fewer samples than ranks.
    """
    known = [each for each in speeds if each > 0]
    usual = statistics.fmean(known) if known else 1.0
    rates = [each if each > 0 else usual for each in speeds]
    fastest = sorted(range(len(rates)), key=lambda place: (-rates[place], place))
    found = [0] * len(rates)
    if total:
        some = [fastest[:count] for count in ([len(fastest)] if total >= len(fastest) else range(1, total + 1))]
        tried = [(even([(0.0, 1 / rates[place]) for place in each], total), each) for each in some]
        (items, _), best = min(tried, key=lambda each: each[0][1])
        for place, count in zip(best, items, strict=True):
            found[place] = count
    return tuple(found)


class Speeds:
    """The speeds that the shares follow, the same on all ranks: each hears the same measurements at the same steps."""

    def __init__(self, *, by_speed: bool) -> None:
        self.by_speed = by_speed
        self._agreed: dict[int, float] = {}
        self._age = 0
        """Steps since the speeds were changed or compared."""
        self._own: list[float] = []

    def shares(self, members: Collection[int], total: int) -> dict[int, int]:
        """The samples of each member in a batch of `total`."""
        counts = shares([self._agreed.get(each, 0.0) for each in members], total)
        return dict(zip(members, counts, strict=True))

    def note(self, samples: int, seconds: float) -> None:
        """This rank has computed so many samples."""
        self._own.append(samples / max(seconds, 1e-9))

    @property
    def own(self) -> float:
        """This rank's median speed in the present window; 0: not measured."""
        return statistics.median(self._own) if self._own and self.by_speed else 0.0

    def advance(self, measured: Mapping[int, float], total: int) -> None:
        """A step was made, in which the members told these speeds. `total`: samples of a whole batch."""
        self._age += 1
        if self._age < WINDOW:
            return
        self._age, self._own = 0, []
        found = {each: speed for each, speed in measured.items() if speed > 0}
        if len(found) < len(measured) or not found:
            return
        present, better = self.shares(found, total), shares(list(found.values()), total)
        before_s = max(present[each] / speed for each, speed in found.items())
        after_s = max(count / speed for count, speed in zip(better, found.values(), strict=True))
        if before_s > WORTH * after_s:
            self._agreed = found

    def state(self) -> tuple[dict[int, float], int]:
        """What another rank needs, for `load`."""
        return dict(self._agreed), self._age

    def load(self, state: tuple[dict[int, float], int]) -> None:
        """Goes on from the state of another rank."""
        if self._age != state[1] or self._agreed != state[0]:
            self._own = []
        self._agreed, self._age = dict(state[0]), state[1]
