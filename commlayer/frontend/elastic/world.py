"""`World`: the present WORLD of a job. Its members agree on the next one, and meet in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ...config import Policy
from ...transport.store_link import root_of
from ..group.backend import CommProcessGroup
from ..group.options import Options
from ..group.party import Party, Place, here, introduce


class World(Party):
    """The members' ranks are those in WORLD. Each of them is a row of its own, which has the whole model (`Rows`: not
    so)."""

    JOB = "commlayer/elastic"
    OPENS = "job.sampler() makes it one"
    KEEPS_WORLD = False

    ARE_DIVIDED: ClassVar[bool] = False
    """Whether gradients are averaged in several groups, of which one may fail and another not."""

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

    @property
    def all(self) -> CommProcessGroup:
        """The group of all members."""
        world: Any = dist.group.WORLD
        return world  # type: ignore[no-any-return]

    @property
    def peers(self) -> CommProcessGroup:
        """The group between which this rank's gradients are averaged."""
        return self.all

    def average(self, values: Tensor, *, is_async: bool) -> Any:
        """Starts the average over all rows, in place, and waits for it unless `is_async`."""
        return dist.all_reduce(values, op=dist.ReduceOp.AVG, async_op=is_async)

    def total(self, values: Tensor) -> None:
        """Adds the values of all members, in place."""
        dist.all_reduce(values)

    def conclude(self) -> None:
        """Returns once all members have made all steps. Where another one still steps, both get MismatchError."""
        self.total(torch.zeros(1, dtype=torch.float32, device="cpu"))

    @property
    def row_size(self) -> int:
        """The ranks of a row."""
        return 1

    @property
    def row(self) -> list[int]:
        """The members of this row, this one included."""
        return [self.own]

    def rows(self, members: Collection[int]) -> list[list[int]]:
        """The rows of these members. The ranks of a row are in the order of their places."""
        return [[each] for each in members]

    def likes(self) -> list[list[int]]:
        """The members by place: those that have the same part of the model, by rows."""
        return [list(self.members)]

    def tell_row(self, own: Sequence[float]) -> list[list[float]]:
        """What each rank of this row tells, in the order of `row`. All its ranks call. Raises PeerLostError if they
        cannot."""
        return [list(own)]

    def tell_leaving(self) -> None:
        """This member is about to leave, and its row with it. Idempotent."""

    def tell_left(self) -> None:
        """This member has left: its process may end."""

    def tell_end(self, cause: BaseException) -> None:
        """This member makes no more steps, because of this error."""

    def is_row_leaving(self) -> bool:
        """Whether another member of this row is."""
        return False

    def loss(self, error: BaseException | None, others: Collection[int] | None = None) -> str:  # noqa: ARG002  # see Rows
        """The text of an error if other members of this row are known to be gone, without which it cannot go on; else
        it is empty. `error`: what this member has found. `others`: those that go on; None: not agreed yet."""
        return ""

    def abandon(self) -> None:
        """This member makes no more steps: the others need not wait for it."""
        self.end()

    def close(self) -> None:
        """Watches the others no more. Idempotent."""
        self.pulse.close()

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
