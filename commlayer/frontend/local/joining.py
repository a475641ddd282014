"""`Joining`: what a site that joins lacks, and how it gets it while the others train.

It takes part in the syncs without a change of its own, and keeps their outcomes, whose bits are everyone's. Meanwhile
another site sends it the state of an earlier sync. Once that is here, it applies the outcomes that are not in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from ..group.transfer import Transfers
from .sync import Outcome

KEPT_BYTES = 2 << 30
"""So much of outcomes a site keeps (but `KEPT_LEAST` at least). Then it makes the others wait for it."""

KEPT_LEAST = 8


class Joining:
    """`load` takes over a state, and returns the number of the syncs in it; `apply` applies the outcome of a sync."""

    def __init__(self, transfers: Transfers, load: Callable[[Tensor], int], apply: Callable[[Outcome], None]) -> None:
        self._transfers, self._load, self._apply = transfers, load, apply
        self._kept: deque[tuple[int, Outcome]] = deque()
        self._kept_bytes = 0
        self.is_loaded = False
        transfers.listen()

    def begin(self) -> None:
        """A state comes, from its beginning, which has all earlier syncs."""
        self._kept.clear()
        self._kept_bytes, self.is_loaded = 0, False

    @property
    def is_done(self) -> bool:
        """Whether this site has what all others have."""
        return self.is_loaded and not self._kept

    def keep(self, turn: int, outcome: Outcome) -> None:
        """The outcome of a sync, the latest one."""
        self._kept.append((turn, outcome))
        self._kept_bytes += outcome.average.nbytes

    @property
    def is_full(self) -> bool:
        """Whether no more outcomes should come before the state."""
        return not self.is_loaded and self._kept_bytes > KEPT_BYTES and len(self._kept) >= KEPT_LEAST

    def catch_up(self, *, waits: bool = False) -> bool:
        """Does one thing that this site lacks; False: nothing can be done now. `waits`: first waits for a piece of the
        state. Raises the errors of messages."""
        receiving = self._transfers.receiving
        if not self.is_loaded:
            state = None if receiving is None else receiving.pump(waits=waits)
            if state is None:
                return waits and receiving is not None
            turn, self.is_loaded, self._transfers.receiving = self._load(state), True, None
            while self._kept and self._kept[0][0] < turn:
                self._kept.popleft()
        elif self._kept:
            self._apply(self._kept.popleft()[1])
        else:
            return False
        return True
