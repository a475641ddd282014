"""`Rows`: the members of a job whose model FSDP2 shards within rows of ranks. A row goes as a whole.

Each row has the whole model, and each of its ranks the part of its place. The groups of FSDP2's mesh connect a row, and
cannot be replaced. So WORLD and these groups stay. Beside them the members have two groups, which are made anew after a
death: one of all members, and one of the ranks of this place in all rows, between which gradients are averaged.

The ranks of a row go to an agreement together, or none of them: one that trained on would wait for the others in the
forward pass, and they for it. So they tell each other, after each step and each meeting, whether one of them failed.

A row that joins has a WORLD of its own, in which its ranks have other numbers than in the job. So its processes have a
second engine, for the two groups of the job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from ...errors import CommError, ConfigError, PeerLostError
from ...transport.accord import store_errors
from ...transport.native import Engine
from ..group.backend import CommProcessGroup
from ..group.mates import Mates
from ..group.told import divided
from .world import World

DESCRIPTION = "commlayer.elastic"
"""The beginning of the groups' names."""


def rows_of(world: CommProcessGroup, row: CommProcessGroup | None) -> list[list[int]]:
    """The rows of a job, of which `row` connects this rank's; empty: each rank has the whole model. All ranks of WORLD
    call.

    Raises ConfigError, with the same text on all, unless each rank is in one row, and all rows have equally many.
    """
    told: list[Any] = [None] * world.size()
    dist.all_gather_object(told, None if row is None else dist.get_process_group_ranks(row), group=world)
    whole = [rank for rank, ranks in enumerate(told) if ranks is None]
    if len(whole) == len(told):
        return []
    if whole:
        raise ConfigError(
            f"elastic: fully_shard divides the model on some ranks, but not on rank(s) {', '.join(map(str, whole))}: "
            f"call it alike on all ranks"
        )
    rows, is_equal = divided(told)
    if not is_equal:
        raise ConfigError(
            f"elastic: fully_shard's meshes have the ranks {', '.join(map(str, rows))}: each "
            f"rank must be in one of them, and all must have equally many ranks; make one mesh of all ranks, "
            f"init_device_mesh('cpu', (rows, shards)), and give fully_shard its dimension of the shards"
        )
    return rows


class Rows(World):
    """The members are ranks of the first WORLD, which stays, and of rows that have joined."""

    ARE_DIVIDED = True
    KEEPS_WORLD = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._use_rows([])
        self._group_of_row: CommProcessGroup | None = None
        self._ranks_of_row: list[int] = []
        """In this process's WORLD."""
        self._engine: Engine | None = None
        """That of the job's groups; None: the process's."""
        self._all: CommProcessGroup | None = None
        self._peers: CommProcessGroup | None = None
        self._is_told = False

    @classmethod
    def of_row(cls, world: CommProcessGroup, silence_s: float, rows: list[list[int]], row: CommProcessGroup) -> Rows:
        """The first ones of a job, of which `row` connects this rank's. All ranks of WORLD call, after `rows_of`."""
        found = cls.of(world, silence_s)
        assert isinstance(found, Rows)  # noqa: S101  # for mypy
        found._use_rows(rows)
        found._connect(row)
        try:
            found.make()
            found.total(
                torch.zeros(1, dtype=torch.float32, device="cpu")
            )  # or the error of a rank that is ahead would end the meeting of the others
        except BaseException:
            found.end()
            found.close()
            raise
        return found

    def enter(self, row: CommProcessGroup, engine: Engine) -> None:
        """For a row that joins, whose ranks this group connects. `engine`: for the groups of the job; `close` releases
        it."""
        self._connect(row)
        self._engine = engine

    def _connect(self, row: CommProcessGroup) -> None:
        self._group_of_row, self._ranks_of_row = row, dist.get_process_group_ranks(row)
        self._mates = Mates(self, self.row, "row")

    # ---- who they are ----

    @property
    def row_size(self) -> int:
        return len(self._rows[0])

    def _use_rows(self, rows: list[list[int]]) -> None:
        """Those of the first WORLD."""
        self._rows, self._first_size = rows, sum(map(len, rows))
        self._row_by = {member: row for row in rows for member in row}

    def rows(self, members: Collection[int]) -> list[list[int]]:
        living = set(members)
        found = {row[0]: row for row in map(self._row_of, living)}
        return [row for _, row in sorted(found.items()) if living.issuperset(row)]

    def whole(self, members: Collection[int]) -> set[int]:
        return {mate for each in members for mate in self._row_of(each)}

    @property
    def row(self) -> list[int]:
        return self._row_of(self.own)

    def _row_of(self, member: int) -> list[int]:
        """Those of a row that has joined follow each other, and all those of the first WORLD."""
        if (found := self._row_by.get(member)) is None:
            size = self.row_size
            begin = member - (member - self._first_size) % size
            found = self._row_by[member] = list(range(begin, begin + size))
        return found

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
            engine=self._engine,
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
        if self._engine is not None:
            self._engine.release()
            self._engine = None

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
        _reduce(self.peers, torch.zeros(1, dtype=torch.float32, device="cpu"), dist.ReduceOp.SUM, is_async=False)
        super().conclude()

    def tell_row(self, own: Sequence[float]) -> list[list[float]]:
        """Exactly what was told. The row's group is never made again: the row ends with it."""
        assert self._group_of_row is not None  # noqa: S101  # for mypy
        told = torch.zeros(self.row_size, len(own), dtype=torch.float64, device="cpu")
        told[self.row.index(self.own)] = torch.tensor(own, dtype=torch.float64, device="cpu")
        try:
            # The groups of FSDP2's mesh have a timeout of their own.
            _reduce(self._group_of_row, told, dist.ReduceOp.SUM, is_async=False, timeout=self.options._timeout)
        except CommError as error:
            raise PeerLostError(
                self.loss(error)
                or f"rank {self.own}: the group of its row, {_listed(self.row)}, has failed, and a row cannot train "
                f"without it; the others go on without this row, if they are enough; end this process ({error})"
            ) from error
        return [list(each) for each in told.tolist()]

    # ---- a row that goes ----

    def tell_leaving(self) -> None:
        if not self._is_told:
            with self._store_errors():
                self.store("leaving").set(f"{self.own}", "")
            self._is_told = True

    def tell_left(self) -> None:
        self._mates.leave()

    def tell_end(self, cause: BaseException) -> None:
        self._mates.give_up(cause)

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
        if others is None:
            others = set(self.members)
            with contextlib.suppress(RuntimeError):  # without a Store
                others -= self.whole(self.dead(others - set(self.row)))
        rank = error.culprit if isinstance(error, CommError) else None  # that in WORLD
        numbers = dict(zip(self._ranks_of_row, self.row, strict=True))
        return self._mates.loss(None if rank is None else numbers.get(rank), others, 0.0)

    # ---- for rows that join ----

    def roster(self) -> dict[str, Any]:
        return {**super().roster(), "rows": self._rows}

    def follow(self, roster: Mapping[str, Any]) -> None:
        self._use_rows(roster["rows"])
        super().follow(roster)


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _reduce(
    group: CommProcessGroup,
    values: Tensor,
    op: dist.ReduceOp.RedOpType,
    *,
    is_async: bool,
    timeout: timedelta | None = None,
) -> Any:
    """`dist.all_reduce`, for a group that torch does not know. `timeout`: None: the group's."""
    options = AllreduceOptions()
    if timeout is not None:
        options.timeout = timeout
    options.reduceOp = dist.ReduceOp(op)
    work: Any = group.allreduce([values], options)
    if is_async:
        return work
    work.wait()
    return None
