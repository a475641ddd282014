"""`Party`: processes that train together, and agree on those that go on when some of them die.

They agree through the Store, since collectives fail with the dead, and meet in a new group.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch.distributed as dist

from ...errors import OperationTimeoutError, PeerLostError
from ...transport.bootstrap import presence
from ...transport.native import host_key
from ...transport.pulse import Pulse
from ...transport.survivors import BEGUN, PAUSE_S, Survivors, Verdict

ATTEMPTS = 16
"""The most groups that the members of a party try to make after a death before they give up."""

Place = tuple[str, int]
"""A process: the key of its host, and its id."""


def here() -> Place:
    """This process."""
    return host_key(), os.getpid()


def introduce(group: dist.ProcessGroup) -> tuple[str, dict[int, Place]]:
    """A name that no other call returns, and the ranks' places. All ranks of the group call."""
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, (here(), secrets.token_hex(8)), group=group)
    return told[0][1], {rank: place for rank, (place, _) in enumerate(told)}


def change(gone: Collection[int], newest: Collection[int]) -> str:
    """Who has left a party and who joins it, for a log."""
    parts = [f"without {sorted(gone)}"] * bool(gone) + [f"as {sorted(newest)} join"] * bool(newest)
    return " and ".join(parts) or "as before"


class Party:
    """Members have numbers, which they keep; their ranks in a group follow the order of `members`."""

    JOB: ClassVar[str]
    """The key under which the token of the latest party that takes newcomers stands in the Store."""
    OPENS: ClassVar[str]
    """What makes a job one that takes newcomers, for an error."""
    KEEPS_WORLD: ClassVar[bool]
    """Whether WORLD stays as members go, and processes that join may have one of their own."""

    def __init__(self, root: dist.Store, token: str, own: int, place: Place, silence_s: float) -> None:
        """`token`: the party's; the Store `root` may have keys of others. `own`: the number of this process, which
        `name` may give later. `silence_s`: after so long a silence, a process of another host is dead."""
        self.root, self.token = root, token
        self.members: list[int] = []
        self.silence_s, self.timeout_s = silence_s, 0.0
        self.generation = 0
        self._prefix, self._place = f"{self.JOB}/{token}", place
        self.name(own)

    def name(self, own: int) -> None:
        """This process has this number."""
        self.own = own
        self.places: dict[int, Place] = {own: self._place}
        self.pulse = Pulse(self.store("pulse"), own, self.places, self.silence_s)

    def store(self, part: str) -> Any:
        """A part of the Store."""
        return dist.PrefixStore(f"{self._prefix}/{part}", self.root)

    def add(self, places: dict[int, Place], *, are_new: bool = False) -> None:
        """Watches these processes, too. New ones must not stand still before they have met the others."""
        self.places |= places
        for number, place in places.items():
            self.pulse.add(number, place, beats=are_new)

    def dead(self, watched: Collection[int]) -> set[int]:
        """Those that have ended, or are silent."""
        return self.pulse.dead(watched)

    def tell(self, part: str, value: Any) -> dict[int, Any]:
        """Tells `value` to the other members, and returns theirs, by member, as JSON has it. All call, once for a part.
        Those that die meanwhile are left out; a collective would end with them.

        Values that are alike are read once. Raises OperationTimeoutError, which names who has not come.
        """
        store, text, end_s = self.store(part), json.dumps(value), time.monotonic() + self.timeout_s
        digest = hashlib.sha256(text.encode()).hexdigest()
        store.set(f"{self.own} whole", text)
        store.set(f"{self.own}", digest)
        found, awaited = {}, set(self.members)
        while awaited:
            for member in sorted(awaited):
                if store.check([f"{member}"]):
                    theirs = store.get(f"{member}").decode()
                    found[member] = json.loads(text if theirs == digest else store.get(f"{member} whole"))
            awaited -= {*found, *self.dead(awaited - {*found})}
            if awaited and time.monotonic() > end_s:
                late = ", ".join(map(str, sorted(awaited)))
                raise OperationTimeoutError(f"rank {self.own}: rank(s) {late} did not come within {self.timeout_s:g} s")
            if awaited:
                time.sleep(PAUSE_S)
        return dict(sorted(found.items()))

    def whole(self, members: Collection[int]) -> set[int]:
        """These, and those that cannot go on without them."""
        return set(members)

    def survivors(self) -> Survivors:
        """The agreement of the members."""
        store = self.store(f"agreement {self.generation}")
        return Survivors(store, self.own, self.members, self.dead, self.whole)

    def agree(self, gone: Collection[int]) -> Verdict | None:
        """See `Survivors.agree`. After a verdict, the next agreement is another one."""
        verdict = self.survivors().agree(gone, self.timeout_s)
        self.generation += verdict is not None
        return verdict

    def meeting(self) -> AbstractContextManager[None]:
        """A context in which the members make a group. It ends with PeerLostError as soon as one of them is known to
        have died, or to try again already."""
        return presence(self._check_present)

    def roster(self) -> dict[str, Any]:
        """What a process needs to meet the members, for `follow`; as JSON has it."""
        places = {str(number): self.places[number] for number in self.members}
        return {
            "generation": self.generation,
            "members": self.members,
            "places": places,
            "timeout_s": self.timeout_s,
        }

    def follow(self, roster: Mapping[str, Any]) -> None:
        """Takes over what another process has written."""
        self.generation, self.members = roster["generation"], list(roster["members"])
        self.timeout_s = roster["timeout_s"]
        self.add({int(number): (host, process) for number, (host, process) in roster["places"].items()})

    def _check_present(self) -> None:
        dead = self.dead(set(self.members) - {self.own})
        if dead:
            raise PeerLostError(f"rank {self.own}: rank(s) {sorted(dead)} died while the ranks met")
        if self.store(f"agreement {self.generation}").check([BEGUN]):
            raise PeerLostError(f"rank {self.own}: another rank lost one while the ranks met")
