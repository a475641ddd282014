"""`Members`: the ranks of a group as messages name them: by their rank in the job, with their host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

TOLD_MAX = 16
"""Ranks that a message names; it counts the others."""


@dataclasses.dataclass
class Members:
    """One group, as one of its ranks sees it. Ranks in arguments are ranks of the group."""

    group: str
    """Name of the group."""
    rank: int
    ranks: Sequence[int]
    """Their ranks in the job."""
    hosts: dict[int, str] = dataclasses.field(default_factory=dict)
    """Host names by rank of the job, as far as they are known."""

    @property
    def who(self) -> str:
        """This rank and the group: the beginning of a text."""
        return f"rank {self.ranks[self.rank]} of group {self.group!r}"

    def number(self, rank: int) -> str:
        """The rank in the job, with its host if the group is known to have several: `4 (hostb)`."""
        number = self.ranks[rank]
        known = {self.hosts[member] for member in self.ranks if member in self.hosts}
        return f"{number} ({self.hosts[number]})" if len(known) > 1 and number in self.hosts else str(number)

    def name(self, rank: int) -> str:
        """`rank 4 (hostb)`."""
        return f"rank {self.number(rank)}"

    def names(self, ranks: Iterable[int]) -> str:
        """`rank(s) 4 (hostb), 5 (hostb) and 100 others`."""
        numbers = list(ranks)
        rest = len(numbers) - TOLD_MAX
        told = ", ".join(map(self.number, numbers[:TOLD_MAX]))
        return f"rank(s) {told}{f' and {rest} others' if rest > 0 else ''}"
