"""A forked child has copies of its parent's engines, groups and records. It disowns them, and so touches nothing of its
parent: no socket, shared memory, Store, bell or file.

A DataLoader's workers are such children, and torch's `destroy_process_group` runs in any process that calls it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Owned(Protocol):
    """What belongs to the process that made it."""

    def disown(self) -> None:
        """This process is a forked child. Locks may be held by threads that it lacks: makes new ones, and waits for
        nothing."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def disowned_in_children(thing: Owned) -> None:
    """Calls `thing.disown()` in each process that is forked from this one, as long as `thing` lives."""
    _owned.add(thing)


def _disown() -> None:
    for thing in list(_owned):
        thing.disown()


os.register_at_fork(after_in_child=_disown)
