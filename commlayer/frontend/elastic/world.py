"""`World`: the present WORLD of a job. Its members agree on the next one, and meet in it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...config import Policy
from ...errors import OperationTimeoutError, PeerLostError
from ...transport.bootstrap import check_present
from ...transport.native import host_key
from ...transport.pulse import Pulse
from ...transport.store_link import root_of
from ...transport.survivors import BEGUN, PAUSE_S, Survivors, Verdict
from ..group.backend import CommProcessGroup
from ..group.options import Options

JOB = "commlayer/elastic"
"""The key under which a job's token stands in its Store."""

Place = tuple[str, int]
"""A process: the key of its host, and its id."""


class World:
    """Members have numbers, which they keep; their ranks in WORLD follow the order of `members`."""

    def __init__(self, root: dist.Store, token: str, own: int, place: Place, timeout_s: float) -> None:
        """`timeout_s`: after so long a silence, a process of another host is dead. `own`: the number of this one, which
        `name` may give later."""
        self.root, self.token = root, token
        self.members: list[int] = []
        self._place, self.silence_s = place, timeout_s
        self.name(own)
        self.generation = 0
        self.backend = ""
        self.options = Options()

    @classmethod
    def of(cls, world: CommProcessGroup, timeout_s: float) -> World:
        """The first one of a job. All its ranks call."""
        backend, store = c10d._world.pg_map[world]
        places: list[Any] = [None] * world.size()
        own = (host_key(), os.getpid())
        dist.all_gather_object(places, (own, secrets.token_hex(8)))
        token = places[0][1]  # the Store may have keys of a former life of the job
        found = cls(root_of(store), token, world.rank(), own, timeout_s)
        found.members = list(range(world.size()))
        found.backend, found.options = str(backend), Options(world.policy, timeout=world.timeout)
        found.add({number: place for number, (place, _) in enumerate(places)})
        return found

    def name(self, own: int) -> None:
        """This process has this number."""
        self.own = own
        self.places: dict[int, Place] = {own: self._place}
        self.pulse = Pulse(self.store("pulse"), own, self.places, self.silence_s)

    @property
    def timeout_s(self) -> float:
        """Of operations."""
        return self.options._timeout.total_seconds()

    def store(self, part: str) -> Any:
        """A part of the job's Store."""
        return dist.PrefixStore(f"{JOB}/{self.token}/{part}", self.root)

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

    # ---- the next WORLD ----

    def survivors(self) -> Survivors:
        """The agreement of the members."""
        return Survivors(self.store(f"agreement {self.generation}"), self.own, self.members, self.dead)

    def agree(self, gone: Collection[int]) -> Verdict | None:
        """See `Survivors.agree`. After a verdict, the next agreement is another one."""
        verdict = self.survivors().agree(gone, self.timeout_s)
        self.generation += verdict is not None
        return verdict

    def make(self) -> None:
        """Makes the WORLD of the members. Raises CommError if that fails, and as soon as one of them is known to have
        died or to try again already."""
        c10d._world.group_count = 0  # torch's number, and so the name, of the group; a WORLD that failed has counted
        token = check_present.set(self._check_present)
        try:
            dist.init_process_group(
                self.backend,
                store=self.store(f"world {self.generation}"),
                rank=self.members.index(self.own),
                world_size=len(self.members),
                timeout=self.options._timeout,
                pg_options=self.options,
            )
        finally:
            check_present.reset(token)

    def end(self) -> None:
        """Ends all groups here, and their operations on all other ranks."""
        if dist.is_initialized():
            c10d._abort_process_group()

    def _check_present(self) -> None:
        dead = self.dead(set(self.members) - {self.own})
        if dead:
            raise PeerLostError(f"rank {self.own}: rank(s) {sorted(dead)} died while the ranks met")
        if self.store(f"agreement {self.generation}").check([BEGUN]):
            raise PeerLostError(f"rank {self.own}: another rank lost one while the ranks met")

    # ---- for processes that join ----

    def roster(self) -> str:
        """What a process needs to meet the members in this WORLD, for `follow`."""
        return json.dumps(
            {
                "generation": self.generation,
                "members": self.members,
                "places": {number: self.places[number] for number in self.members},
                "backend": self.backend,
                "policy": dataclasses.asdict(self.options.policy),
                "timeout_s": self.timeout_s,
            }
        )

    def follow(self, roster: str) -> None:
        """Takes over what another process has written."""
        found = json.loads(roster)
        self.generation, self.members = found["generation"], found["members"]
        self.add({int(number): (host, process) for number, (host, process) in found["places"].items()})
        self.backend = found["backend"]
        self.options = Options(Policy(**found["policy"]), timeout=timedelta(seconds=found["timeout_s"]))
