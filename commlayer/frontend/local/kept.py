"""`Kept`: the outcomes of syncs that have ended, and that a site has not applied yet, in their order."""

from __future__ import annotations

import dataclasses
from collections import deque

from torch import Tensor

from .sync import Outcome, Sync

KEPT_BYTES = 2 << 30
"""So much of outcomes a site keeps (but `KEPT_LEAST` at least). Then it makes the others wait for it."""

KEPT_LEAST = 8


@dataclasses.dataclass
class Ended:
    """A sync that has ended."""

    turn: int
    outcome: Outcome
    counted: Tensor | float = 0.0
    """q of this site, which it has not taken from its weights yet."""
    own: Sync | None = None
    """The sync, if this site counted in it: a checkpoint has it as one in flight."""
    age: int = 0
    """Local steps since it began."""


class Kept:
    """The oldest is `first`."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def first(self) -> Ended:
        """The next to be applied."""
        return self._ended[0]

    def add(self, ended: Ended) -> None:
        """The latest one."""
        self._ended.append(ended)
        self._bytes += ended.outcome.average.nbytes

    def take(self) -> Ended:
        """The oldest one, which is no longer kept."""
        self._bytes -= self.first.outcome.average.nbytes
        return self._ended.popleft()

    @property
    def is_full(self) -> bool:
        """Whether no more should come."""
        return self._bytes > KEPT_BYTES and len(self) >= KEPT_LEAST
