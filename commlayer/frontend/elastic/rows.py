"""`Rows`: the members of a job whose model FSDP2 shards within rows of ranks. A row goes as a whole.

Each row has the whole model, and each of its ranks the part of its place. The groups of FSDP2's mesh connect a row, and
cannot be replaced. So WORLD and these groups stay. Beside them the members have two groups, which are made anew after a
death: one of all members, and one of the ranks of this place in all rows, between which gradients are averaged.

The ranks of a row go to an agreement together, or none of them: one that trained on would wait for the others in the
forward pass, and they for it. So they tell each other, after each step and each meeting, whether one of them failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from ...errors import CommError, ConfigError
from ...transport.accord import store_errors
from ...transport.log import log
from ..group.backend import CommProcessGroup
from .world import World

DESCRIPTION = "commlayer.elastic"
"""The beginning of the groups' names."""


class Rows(World):
    """The members are ranks of the first WORLD, which stays."""

    ARE_DIVIDED = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._rows: list[list[int]] = []
        self._group_of_row: CommProcessGroup | None = None
        self._all: CommProcessGroup | None = None
        self._peers: CommProcessGroup | None = None
        self._is_told = False

    @classmethod
    def of_row(cls, world: CommProcessGroup, silence_s: float, row: CommProcessGroup) -> Rows:
        """The first ones of a job, of which `row` connects this rank's. All ranks of WORLD call.

        Raises ConfigError, with the same text on all, unless each rank is in one row, and all rows have equally many.
        """
        told: list[Any] = [None] * world.size()
        dist.all_gather_object(told, dist.get_process_group_ranks(row))
        rows = sorted({tuple(ranks) for ranks in told})
        if len({len(ranks) for ranks in rows}) > 1 or sum(map(len, rows)) != len(told):
            raise ConfigError(
                f"elastic: fully_shard's meshes have the ranks {', '.join(str(list(ranks)) for ranks in rows)}: each "
                f"rank must be in one of them, and all must have equally many ranks; make one mesh of all ranks, "
                f"init_device_mesh('cpu', (rows, shards)), and give fully_shard its dimension of the shards"
            )
        found = cls.of(world, silence_s)
        assert isinstance(found, Rows)  # noqa: S101  # for mypy
        found._rows, found._group_of_row = [list(ranks) for ranks in rows], row
        try:
            found.make()
        except BaseException:
            found.end()
            found.close()
            raise
        return found

    # ---- who they are ----

    @property
    def row_size(self) -> int:
        return len(self._rows[0])

    def rows(self, members: Collection[int]) -> list[list[int]]:
        return [row for row in self._rows if set(row) <= set(members)]

    def whole(self, members: Collection[int]) -> set[int]:
        return {*members, *(each for row in self._rows for each in row if not set(row).isdisjoint(members))}

    @property
    def row(self) -> list[int]:
        return next(row for row in self._rows if self.own in row)

    def likes(self) -> list[list[int]]:
        return [list(ranks) for ranks in zip(*self.rows(self.members), strict=True)]

    # ---- their groups ----

    @property
    def all(self) -> CommProcessGroup:
        assert self._all is not None  # noqa: S101  # for mypy
        return self._all

    @property
    def peers(self) -> CommProcessGroup:
        assert self._peers is not None  # noqa: S101  # for mypy
        return self._peers

    def make(self) -> None:
        place = self.row.index(self.own)
        with self.meeting():
            self._all = self._group("all", self.members)
            self._peers = self._group(f"place {place}", self.likes()[place])

    def _group(self, name: str, ranks: Sequence[int]) -> CommProcessGroup:
        found = CommProcessGroup(
            self.store(f"{name} {self.generation}"),
            ranks.index(self.own),
            len(ranks),
            self.options._timeout,
            f"{DESCRIPTION}:{self.generation}:{name}",
            ranks,
            self.options.policy,
        )
        found._set_group_desc(DESCRIPTION)
        return found

    def end(self) -> None:
        for group in (self._peers, self._all):
            if group is not None:
                group.abort()
        self._leave()

    def close(self) -> None:
        super().close()
        self._leave()

    def _leave(self) -> None:
        for group in (self._peers, self._all):
            if group is not None:
                group.shutdown()
        self._peers = self._all = None

    def average(self, values: Tensor, *, is_async: bool) -> Any:
        return _reduce(self.peers, values, dist.ReduceOp.AVG, is_async=is_async)

    def total(self, values: Tensor) -> None:
        _reduce(self.all, values, dist.ReduceOp.SUM, is_async=False)

    def conclude(self) -> None:
        """Begins where a step does, between the ranks of this place: so the two meet."""
        _reduce(self.peers, torch.zeros(1), dist.ReduceOp.SUM, is_async=False)
        super().conclude()

    def row_fails(self, *, failed: bool) -> bool:
        assert self._group_of_row is not None  # noqa: S101  # for mypy
        flag = torch.tensor([float(failed)])
        try:
            _reduce(self._group_of_row, flag, dist.ReduceOp.MAX, is_async=False)
        except CommError as error:
            log.warning("rank %d: its row has failed: %s", self.own, error)
            return True
        return flag.item() > 0

    # ---- a row that goes ----

    def tell_leaving(self) -> None:
        if not self._is_told:
            with self._store_errors():
                self.store("leaving").set(f"{self.own}", "")
            self._is_told = True

    def is_row_leaving(self) -> bool:
        store = self.store("leaving")
        with self._store_errors():
            return any(store.check([f"{each}"]) for each in self.row)

    def _store_errors(self) -> contextlib.AbstractContextManager[None]:
        return store_errors(lambda text: CommError(f"rank {self.own}: {text}"))

    def abandon(self) -> None:
        """Also the row's operations: its other ranks would wait for this one in the forward pass."""
        if self._group_of_row is not None and self.row_size > 1:
            self._group_of_row.abort()
        self.end()

    def loss(self, error: BaseException | None, others: Collection[int] | None = None) -> str:
        mates, gone = set(self.row) - {self.own}, set[int]()
        rest = set(self.members) - set(self.row)
        with contextlib.suppress(RuntimeError):  # without a Store
            gone = self.dead(mates) or self.survivors().withdrawn(mates)
            rest -= self.whole(self.dead(rest))
        others = rest if others is None else others
        if not gone and isinstance(error, CommError) and error.culprit in mates:
            gone = {error.culprit}
        if not gone:
            return ""
        then = f"rank(s) {_listed(others)} go on without this row" if others else "no row is whole any more"
        remedy = "end this process" if others else "start the job again from a checkpoint"
        return (
            f"rank {self.own}: rank(s) {_listed(gone)} of its row, {_listed(self.row)}, died or ended, and a row "
            f"cannot train without one of its ranks; {then}; {remedy}"
        )


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _reduce(group: CommProcessGroup, values: Tensor, op: dist.ReduceOp.RedOpType, *, is_async: bool) -> Any:
    """`dist.all_reduce`, for a group that torch does not know."""
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    work: Any = group.allreduce([values], options)
    if is_async:
        return work
    work.wait()
    return None
