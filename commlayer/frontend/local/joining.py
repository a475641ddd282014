"""`Joining`: what a site that joins lacks, and how it gets it while the others train.

It takes part in the syncs without a change of its own, and keeps their outcomes, whose bits are everyone's. Meanwhile
another site sends it the state of an earlier sync. Once that is here, it applies the outcomes that are not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..group.transfer import Transfers
from .kept import Ended, Kept
from .sync import Outcome


class Joining:
    """`load` takes over a state, and returns the number of the syncs in it; `apply` applies the outcome of a sync."""

    def __init__(self, transfers: Transfers, load: Callable[[Tensor], int], apply: Callable[[Outcome], Any]) -> None:
        self._transfers, self._load, self._apply = transfers, load, apply
        self._kept = Kept()
        self.is_loaded = False
        transfers.listen()

    def begin(self) -> None:
        """A state comes, from its beginning, which has all earlier syncs."""
        self._kept, self.is_loaded = Kept(), False

    @property
    def is_done(self) -> bool:
        """Whether this site has what all others have."""
        return self.is_loaded and not self._kept

    def keep(self, ended: Ended) -> None:
        """The outcome of the latest sync."""
        self._kept.add(ended)

    @property
    def is_full(self) -> bool:
        """Whether no more outcomes should come before the state."""
        return not self.is_loaded and self._kept.is_full

    def catch_up(self, *, waits: bool = False) -> bool:
        """Does one thing that this site lacks; False: nothing can be done now. `waits`: first waits for a piece of the
        state. Raises the errors of messages."""
        receiving = self._transfers.receiving
        if not self.is_loaded:
            state = None if receiving is None else receiving.pump(waits=waits)
            if state is None:
                return waits and receiving is not None
            turn, self.is_loaded, self._transfers.receiving = self._load(state), True, None
            while self._kept and self._kept.first.turn < turn:
                self._kept.take()
        elif self._kept:
            self._apply(self._kept.take().outcome)
        else:
            return False
        return True
