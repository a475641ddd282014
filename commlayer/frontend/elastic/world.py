"""`World`: the present WORLD of a job. Its members agree on the next one, and meet in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...config import Policy
from ...transport.store_link import root_of
from ..group.backend import CommProcessGroup
from ..group.options import Options
from ..group.party import Party, Place, here, introduce


class World(Party):
    """The members' ranks are those in WORLD."""

    JOB = "commlayer/elastic"
    OPENS = "job.sampler() makes it one"

    def __init__(self, root: dist.Store, token: str, own: int, place: Place, silence_s: float) -> None:
        super().__init__(root, token, own, place, silence_s)
        self.backend = ""
        self._use(Options())

    @classmethod
    def of(cls, world: CommProcessGroup, silence_s: float) -> World:
        """The first one of a job. All its ranks call."""
        backend, store = c10d._world.pg_map[world]
        token, places = introduce(world)
        found = cls(root_of(store), token, world.rank(), here(), silence_s)
        found.members = list(places)
        found.backend = str(backend)
        found._use(Options(world.policy, timeout=world.timeout))
        found.add(places)
        return found

    def _use(self, options: Options) -> None:
        """The next WORLD's."""
        self.options, self.timeout_s = options, options._timeout.total_seconds()

    def make(self) -> None:
        """Makes the WORLD of the members. Raises CommError if that fails, and as soon as one of them is known to have
        died or to try again already."""
        c10d._world.group_count = 0  # torch's number, and so the name, of the group; a WORLD that failed has counted
        with self.meeting():
            dist.init_process_group(
                self.backend,
                store=self.store(f"world {self.generation}"),
                rank=self.members.index(self.own),
                world_size=len(self.members),
                timeout=self.options._timeout,
                pg_options=self.options,
            )

    def end(self) -> None:
        """Ends all groups here, and their operations on all other ranks."""
        if dist.is_initialized():
            c10d._abort_process_group()

    # ---- for processes that join ----

    def roster(self) -> dict[str, Any]:
        return {
            **super().roster(),
            "backend": self.backend,
            "policy": dataclasses.asdict(self.options.policy),
        }

    def follow(self, roster: Mapping[str, Any]) -> None:
        super().follow(roster)
        self.backend = roster["backend"]
        self._use(Options(Policy(**roster["policy"]), timeout=timedelta(seconds=roster["timeout_s"])))
