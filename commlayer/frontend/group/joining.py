"""`Joining`: what a process that joins lacks, and how it gets that while the others train.

It takes part in their operations without a contribution of its own, and keeps the outcomes, whose bits are everyone's.
Meanwhile another one sends it the state before them. Once that is here, it applies the outcomes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from .transfer import Transfers

KEPT_BYTES = 2 << 30
"""So much of outcomes a process keeps (but `KEPT_LEAST` at least). Then it makes the others wait for it."""

KEPT_LEAST = 8

OutcomeT = TypeVar("OutcomeT")


class Joining(Generic[OutcomeT]):
    """`load` takes over a state; `apply` applies an outcome; `size` is that of an outcome, in bytes."""

    def __init__(
        self,
        transfers: Transfers,
        load: Callable[[Tensor], Any],
        apply: Callable[[OutcomeT], Any],
        size: Callable[[OutcomeT], int],
    ) -> None:
        self._transfers, self._load, self._apply, self._size = transfers, load, apply, size
        self._kept = deque[OutcomeT]()
        self._bytes = 0
        self.is_loaded = False
        transfers.listen()

    def begin(self) -> None:
        """A state comes, from its beginning, which has all earlier outcomes."""
        self._kept.clear()
        self._bytes, self.is_loaded = 0, False

    @property
    def is_done(self) -> bool:
        """Whether this process has what all others have."""
        return self.is_loaded and not self._kept

    def keep(self, outcome: OutcomeT) -> None:
        """The latest one."""
        self._kept.append(outcome)
        self._bytes += self._size(outcome)

    @property
    def is_full(self) -> bool:
        """Whether no more outcomes should come before the state."""
        return not self.is_loaded and self._bytes > KEPT_BYTES and len(self._kept) >= KEPT_LEAST

    def catch_up(self, *, waits: bool = False) -> bool:
        """Does one thing that this process lacks; False: nothing can be done now. `waits`: first waits for a piece of
        the state. Raises the errors of messages."""
        receiving = self._transfers.receiving
        if not self.is_loaded:
            state = None if receiving is None else receiving.pump(waits=waits)
            if state is None:
                return waits and receiving is not None
            self._load(state)
            self.is_loaded, self._transfers.receiving = True, None
        elif self._kept:
            outcome = self._kept.popleft()
            self._bytes -= self._size(outcome)
            self._apply(outcome)
        else:
            return False
        return True
