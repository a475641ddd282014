"""`Kept`: outcomes of operations that a process has not applied yet, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

KEPT_BYTES = 2 << 30
"""So much of outcomes a process keeps (but `KEPT_LEAST` at least). Then it makes the others wait for it."""

KEPT_LEAST = 8

OutcomeT = TypeVar("OutcomeT")


class Kept(Generic[OutcomeT]):
    """The oldest is `first`. `size` is that of an outcome, in bytes."""

    def __init__(self, size: Callable[[OutcomeT], int]) -> None:
        self._size = size
        self._outcomes = deque[OutcomeT]()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    def first(self) -> OutcomeT:
        """The next to be applied."""
        return self._outcomes[0]

    def add(self, outcome: OutcomeT) -> None:
        """The latest one."""
        self._outcomes.append(outcome)
        self._bytes += self._size(outcome)

    def take(self) -> OutcomeT:
        """The oldest one, which is no longer kept."""
        self._bytes -= self._size(self.first)
        return self._outcomes.popleft()

    def clear(self) -> None:
        """None is kept any more."""
        self._outcomes.clear()
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether no more should come."""
        return self._bytes > KEPT_BYTES and len(self) >= KEPT_LEAST
