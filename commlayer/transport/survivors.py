"""`Survivors`: after a death, the members of a job that live agree on those that are gone.

Each one writes into the Store whom it takes for gone, adds those whom others take for gone, and looks again. When all
that it takes for alive have written the same, it proposes that as the verdict. A verdict is written once and holds for
all, also for a member that lives and is named in it: so one party goes on at most. It also names the newcomers, which
members have invited before.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ..errors import CommError, OperationTimeoutError
from .accord import store_errors
from .base import Store

PAUSE_S = 0.002
"""Pause between looks at the Store."""

BEGUN = "begun"
"""The key that says that a member has come to this agreement."""


INVITED = "invited"
"""The key of the newcomers."""


class Verdict(NamedTuple):
    """On what the members have agreed."""

    gone: set[int]
    joining: list[int]
    """The newcomers."""


class Survivors:
    """One agreement of the `members`, in a part of the Store of its own. `own` is the number of this one.

    `dead` returns those of its argument that are dead. `whole` adds those that cannot go on without its argument: if
    one of them is gone, all are.
    """

    def __init__(
        self,
        store: Store,
        own: int,
        members: Collection[int],
        dead: Callable[[Collection[int]], Collection[int]],
        whole: Callable[[Collection[int]], set[int]] = set,
    ) -> None:
        self._store = store
        self._own = own
        self._members = set(members)
        self._dead = dead
        self._whole = whole

    def agree(self, gone: Collection[int], timeout_s: float) -> Verdict | None:
        """The members that are gone: `gone`, those that are dead, and what other members add. A member that leaves
        names itself. One that lives may find itself in the result: the others go on without it. None: a member has
        called `finish`.

        Members that have not come within the timeout, as a frozen process, are gone, too, if more than half of the
        others have. Otherwise raises OperationTimeoutError, which names the members that are awaited; CommError
        without a Store.
        """
        with store_errors(lambda text: CommError(f"rank {self._own}: {text}")):
            return self._agree(set(gone), timeout_s)

    def finish(self) -> None:
        """Tells members that come to this agreement that nobody has to go on: this one knows that all have done all,
        and does not come. Does nothing without a Store, or after a verdict."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("verdict", "", json.dumps(None))

    def invite(self, newcomers: Collection[int]) -> None:
        """Names those that join. For one member, before the others come to the agreement."""
        self._store.set(INVITED, json.dumps(sorted(newcomers)))

    def is_awaiting(self) -> bool:
        """Whether another member has come to this agreement, and is not gone by its own word. False without a Store."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([BEGUN]):
                texts = {member: self._read(member) for member in self._members - {self._own}}
                return any(theirs is not None and member not in theirs for member, theirs in texts.items())
        return False

    def begin(self) -> None:
        """This member is about to come to this agreement. Does nothing without a Store."""
        with contextlib.suppress(RuntimeError):
            self._store.set(BEGUN, "")

    def withdraw(self) -> None:
        """This member is gone, and does not wait for the others. Does nothing without a Store."""
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self._own), json.dumps([self._own]))
            self._store.set(BEGUN, "")

    def _agree(self, gone: set[int], timeout_s: float) -> Verdict | None:
        self._store.set(BEGUN, "")
        written, end = None, time.monotonic() + timeout_s
        while not self._store.check(["verdict"]):
            gone |= set(self._dead(self._members - gone - {self._own}))
            texts = {member: self._read(member) for member in self._members - gone - {self._own}}
            for theirs in texts.values():
                gone |= (theirs or set()) - {self._own}
            gone = self._whole(gone)
            leaves = self._own in gone
            if gone != written:
                self._store.set(str(self._own), json.dumps(sorted(gone)))
                written = set(gone)
            elif not (leaves and texts) and all(theirs == gone for theirs in texts.values()):
                joining = self._store.get(INVITED).decode() if self._store.check([INVITED]) else "[]"
                self._store.compare_set("verdict", "", json.dumps([sorted(gone), json.loads(joining)]))
            elif time.monotonic() > end and (absent := self._absent(texts)):
                gone |= absent
                end = time.monotonic() + timeout_s
            elif time.monotonic() > end:
                late = ", ".join(str(member) for member, theirs in sorted(texts.items()) if theirs != gone)
                raise OperationTimeoutError(
                    f"rank {self._own}: rank(s) {late} did not agree within {timeout_s:g} s on the ranks that are gone "
                    f"({sorted(gone)} so far); look at their logs and stacks"
                )
            else:
                time.sleep(PAUSE_S)
        verdict = json.loads(self._store.get("verdict"))
        return None if verdict is None else Verdict(set(verdict[0]), verdict[1])

    def _absent(self, texts: Mapping[int, set[int] | None]) -> set[int]:
        """Those that have not come, if the others and this one are more than they are; else nobody. `texts`: what
        each of those that are not gone has written."""
        absent = {member for member, theirs in texts.items() if theirs is None}
        return absent if 2 * len(absent) < 1 + len(texts) else set()

    def _read(self, member: int) -> set[int] | None:
        """Whom another member takes for gone; None: it has not come."""
        key = str(member)
        return set(json.loads(self._store.get(key))) if self._store.check([key]) else None
