"""`GroupLife`: the part of the Store in which the ranks of a group meet, a new one each time the group is made.

The same group can be made again in the same Store, because torchrun's Store outlives `destroy_process_group`. The keys
of its former life would be taken for answers then. To count the ranks that come would not do: one that never comes, or
comes twice, spoils the count for all later starts. So rank 0 alone numbers the lives: the number is odd from the moment
that rank 0 comes until all have come, or rank 0 gives up. The others take the life that rank 0 is in, or will open.
"""

from __future__ import annotations

from torch.distributed import PrefixStore, Store

MOVED = b">"
"""The answer to the ranks of a life whose rank 0 died while it waited: come to the next one."""


class GroupLife:
    """One life of a group of `size` ranks. The size may change between lives: each size has lives of its own."""

    def __init__(self, store: Store, size: int, rank: int) -> None:
        self._root = store
        self._size = size
        self._key = f"commlayer/life/{size}"
        number = store.add(self._key, 0)
        self.store = self._keys(number | 1)
        """The keys of this life."""
        self._is_open = rank == 0
        if self._is_open:
            if number % 2:
                self.store.set("0/all", MOVED)  # type: ignore[arg-type]  # bytes pass, the stub says str
            self.store = self._keys(store.add(self._key, 1 + number % 2))

    def follow(self) -> None:
        """Goes to the present life, after the answer MOVED."""
        self.store = self._keys(self._root.add(self._key, 0) | 1)

    def close(self) -> None:
        """For rank 0, before it lets any rank go: whoever comes from now on is of the next life. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._root.add(self._key, 1)

    def _keys(self, number: int) -> PrefixStore:
        return PrefixStore(f"commlayer/{self._size}/{number}", self._root)
