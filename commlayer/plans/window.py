"""`Window`: slots of scratch memory that are used in turn."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import PlanBuilder


class Window:
    """A few slots of scratch, used in turn: the next user of a slot waits until the last one is done.

    So a plan with many segments takes limited scratch, and has a limited number of segments in flight.
    """

    def __init__(self, builder: PlanBuilder, slot_bytes: int, slots: int) -> None:
        self._offsets = [builder.scratch(slot_bytes) for _ in range(slots)]
        self._users: list[Sequence[int]] = [()] * slots
        self._turn = 0

    def take(self) -> tuple[int, Sequence[int]]:
        """The next slot: its offset in SCRATCH, and the steps to wait for before writing it."""
        return self._offsets[self._turn], self._users[self._turn]

    def release(self, after: Sequence[int]) -> None:
        """Ends the use of the slot taken last: it is free after these steps."""
        self._users[self._turn] = after
        self._turn = (self._turn + 1) % len(self._offsets)
