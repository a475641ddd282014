"""`Turns`: after which local steps a fragment is sent, and how much later its average is applied. Pure numbers."""

from __future__ import annotations

import dataclasses
import math

from ...errors import ConfigError
from ...kind import whole

EVERY_MAX = 1_000_000
"""The largest number of local steps between two syncs of a fragment."""


@dataclasses.dataclass(frozen=True)
class Turns:
    """The turns of `fragments` fragments within `every` local steps.

    Turns are counted from 0; turn j belongs to fragment j mod `fragments`. Turn `since_turn` begins after local step
    `since_step`, and each later one `every` / `fragments` steps after the one before, rounded up; so without changes of
    `every`, turn j begins after local step (j + 1) * `every` / `fragments`. A turn ends when its average is applied:
    `delay` steps later, but before the next turn begins. `delay` is at most the longest distance of two turns. Raises
    ConfigError for values that contradict each other.
    """

    every: int
    """Local steps between two syncs of one fragment: H."""
    fragments: int
    delay: int
    """The most local steps from the start of a sync to its application. Where `fragments` does not divide `every`,
    some turns are a step shorter than others."""
    since_turn: int = -1
    """The turn from which on `every` holds; -1: from the start."""
    since_step: int = 0
    """The local step after which that turn begins."""

    def __post_init__(self) -> None:
        limits = {"every": (1, EVERY_MAX), "fragments": (1, EVERY_MAX), "delay": (0, EVERY_MAX)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not least <= whole(value, -1) <= most:
                raise ConfigError(f"LocalSteps({name}={value!r}): use a whole number, {least} to {most} (steps)")
        if self.every < self.fragments:
            raise ConfigError(
                f"LocalSteps(every={self.every}, fragments={self.fragments}): each fragment needs a step of its own; "
                f"use fragments={self.every} or fewer"
            )
        if self.delay > self._longest:
            raise ConfigError(
                f"LocalSteps(every={self.every}, fragments={self.fragments}, delay={self.delay}): a sync must be "
                f"applied before the next fragment's begins; use a delay up to {self._longest}"
            )

    @property
    def _longest(self) -> int:
        """The longest distance of two turns, in steps."""
        return -(-self.every // self.fragments)

    @property
    def mean_delay(self) -> float:
        """The mean of the local steps from the start of a sync to its application."""
        return min(self.delay, self.every / self.fragments)

    @staticmethod
    def of(every: int, fragments: int, delay: int | None) -> Turns:
        """`delay` None: a whole turn, so that all of the network's time is hidden; 0 where every step has a sync."""
        if delay is None:
            is_plain = whole(every, 0) > 1 and whole(fragments, 0) > 0
            delay = -(-every // fragments) if is_plain else 0
        return Turns(every, fragments, delay)

    def begins(self, steps: int) -> bool:
        """Whether a turn begins after the local step that makes their number `steps`. None begins before
        `since_turn`."""
        made = steps - self.since_step
        return made >= 0 and made * self.fragments // self.every > (made - 1) * self.fragments // self.every

    def length(self, turn: int) -> int:
        """The steps from the start of the turn before, or of the training, to the start of this one."""
        return self.steps(turn) - self.steps(turn - 1)

    def steps(self, turn: int) -> int:
        """The local step after which this turn begins."""
        return self.since_step - (self.since_turn - turn) * self.every // self.fragments

    def changed(self, every: int, turn: int, step: int) -> Turns:
        """The turns with another `every` since `turn`, which begins after `step`; each sync has a whole turn."""
        return dataclasses.replace(Turns.of(every, self.fragments, None), since_turn=turn, since_step=step)

    def resumed(self, before: Turns, turn: int) -> Turns:
        """These turns in a training that had those `before`, and goes on with `turn`: that begins when it would have,
        and with another H the later ones follow it."""
        since = (before.since_turn, before.since_step) if before.every == self.every else (turn, before.steps(turn))
        return dataclasses.replace(self, since_turn=since[0], since_step=since[1])

    def fragment(self, turn: int) -> int:
        """The fragment of a turn. All ranks count turns, never local steps: a GradScaler may skip steps of one rank."""
        return turn % self.fragments


def least_every(bytes_s: float, latency_s: float, step_s: float, fragments: int) -> int:
    """The least number of local steps whose turns all hide a sync, of up to `fragments` fragments: H*.

    The values of all fragments together take `bytes_s` seconds B on a site's link, and each sync `latency_s` seconds L
    more, whatever its length; a step takes `step_s` seconds t. With H steps there are F = min(H, `fragments`)
    fragments, and the shortest turn has H / F steps, rounded down: L + B / F <= floor(H / F) t. 0 without values.
    """
    if bytes_s <= 0:
        return 0
    if latency_s < step_s:
        least = math.ceil(bytes_s / (step_s - latency_s))  # a sync in each step: F = H
        if least <= fragments:
            return least
    return fragments * math.ceil((latency_s + bytes_s / fragments) / step_s)
