"""`Joining`: what a process that joins lacks, and how it gets that while the others train.

It takes part in their operations without a contribution of its own, and keeps the outcomes, whose bits are everyone's.
Meanwhile another one sends it an earlier state. Once that is here, it applies the outcomes that are not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

from torch import Tensor

from .kept import Kept, OutcomeT
from .transfer import Transfers


class Joining(Generic[OutcomeT]):
    """`load` takes over a state; `lacks` tells whether an outcome is not in it; `apply` applies an outcome; `size` is
    that of an outcome, in bytes."""

    def __init__(
        self,
        transfers: Transfers,
        load: Callable[[Tensor], Any],
        lacks: Callable[[OutcomeT], bool],
        apply: Callable[[OutcomeT], Any],
        size: Callable[[OutcomeT], int],
    ) -> None:
        self._transfers, self._load, self._lacks, self._apply = transfers, load, lacks, apply
        self._kept = Kept(size)
        self.is_loaded = False
        transfers.listen()

    def begin(self) -> None:
        """A state comes, from its beginning, which has all earlier outcomes."""
        self._kept.clear()
        self.is_loaded = False

    @property
    def is_done(self) -> bool:
        """Whether this process has what all others have."""
        return self.is_loaded and not self._kept

    def keep(self, outcome: OutcomeT) -> None:
        """The latest one."""
        self._kept.add(outcome)

    @property
    def is_full(self) -> bool:
        """Whether no more outcomes should come before the state."""
        return not self.is_loaded and self._kept.is_full

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
            while self._kept and not self._lacks(self._kept.first):
                self._kept.take()
        elif self._kept:
            self._apply(self._kept.take())
        else:
            return False
        return True
