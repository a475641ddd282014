"""`commlayer.embedding`: a table of an embedding that is divided over the ranks, with the rows in use nearby.

table = commlayer.embedding.Remote("items", rows=10_000_000, width=64, lr=0.05)
for batch in table.ahead(batches, ids=lambda batch: batch.items):
    loss = model(table(batch.items), batch.labels)
    loss.backward()
    table.step()

Read ahead, batches tell which rows are needed when and by whom (Bagpipe, arXiv 2202.12429).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._distributed_c10d import Work

from ...config import Policy, whole
from ...errors import ConfigError
from ..experts.agreement import FACTS, check, facts
from ..experts.exchange import Route, group_of, start, who
from .cache import Cache
from .home import ABSENT, GRADIENT, LENT, RETURN, Home, Orders
from .rule import Optimizer, Rule

Batch = TypeVar("Batch")

EXACT = Policy()

_names: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
"""The names of the tables of each group."""


@dataclasses.dataclass
class Counts:
    """What a rank has done since the table was made."""

    used: int = 0
    """Rows that its batches used, each once in a batch."""
    hits: int = 0
    """Those of them that were in its cache."""
    sent_bytes: int = 0
    """Records, gradients, numbers of rows and orders that it has sent to other ranks."""


class _Batch:
    """The rows of one batch of this rank: by home, and within it ascending."""

    def __init__(self, ids: Tensor, size: int) -> None:
        unique = np.unique(ids.detach().cpu().reshape(-1).numpy().astype(np.int64))
        order = np.lexsort((unique, unique % size))
        self.rows = unique[order]
        self.unique = unique
        self.place = np.empty(len(unique), np.int64)
        """By place in `unique`, the place in `rows`."""
        self.place[order] = np.arange(len(unique))
        self.counts = np.bincount(self.rows % size, minlength=size).tolist()
        self.early = np.zeros(len(unique), np.uint8)
        self.leaf = torch.empty(0, dtype=torch.float32, device="cpu")
        self.slopes: Tensor | None = None
        """The gradients of the rows, after `step`."""


class _Coming(NamedTuple):
    """Records of a batch that are on their way."""

    work: Work
    records: Tensor
    batch: _Batch


class Remote:
    """A table of shape (rows, width), in float32. Row i lives on rank i % P of the group's P, its home, in main memory.

    All ranks of the group (None: WORLD), which must be one of commlayer unless COMMLAYER_DISABLE is set, make it with
    equal arguments. `ahead` reads `lookahead` batches ahead. A row that one rank alone uses next moves to that rank and
    is changed there, until another one uses it; between steps a rank keeps at most `cache` of the table's rows, those
    that it needs next. A row that several ranks use in a step stays at home, which sends its value and adds up the
    gradients. All values are those that the table has without a cache (`cache=0`), bit by bit.

    `optimizer`: "sgd", or "adagrad", row-wise. `lr`, its learning rate, is an attribute that may change between steps,
    on all ranks alike. `init` gives the first values of rows, (n, width), from their numbers, (n,); None: normal with a
    standard deviation of 0.01, by torch's seed, the name and the rank. A rank keeps 4 bytes for each row of the table,
    and a home 49.

    Raises ConfigError for arguments that make no sense or a name that another table of the group has (on the other
    ranks: MismatchError), and on every rank MismatchError if the arguments differ.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        width: int,
        *,
        lr: float,
        optimizer: Optimizer = "sgd",
        cache: float = 0.015,
        lookahead: int = 100,
        init: Callable[[Tensor], Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group_of(group, "embedding.Remote")
        self.counts = Counts()
        self._size, self._rank = self._group.size(), self._group.rank()
        self.name, self.rows, self.width, self.lookahead = name, rows, width, lookahead
        self._who = f"{who(self._group)}: embedding.Remote {name!r}"
        taken = _names.setdefault(self._group, set())
        fault = "the group has a table of this name: give each table its own" if name in taken else ""
        for label, value in (("rows", rows), ("width", width), ("lookahead", lookahead)):
            if whole(value, 0) < 1:
                fault = f"{label}={value!r}: use a whole number of at least 1"
        if not 0 <= cache <= 1:
            fault = f"cache={cache!r}: use the share of rows to keep, 0 to 1"
        fault = fault or Rule.fault(optimizer, lr)
        first = torch.empty(0, dtype=torch.float32, device="cpu")
        if not fault:
            own = torch.arange(self._rank, max(rows, self._rank), self._size, device="cpu")
            first = self._drawn(len(own)) if init is None else init(own)
            if first.shape != (len(own), width):
                fault = f"init gives {tuple(first.shape)} for {len(own)} rows: give (n, {width})"
        described = f"{rows} x {width}, {optimizer}, lr {lr}, cache {cache}, lookahead {lookahead}"
        self._agree(f"table {name!r}: {described}", fault)
        taken.add(name)
        weakref.finalize(self, taken.discard, name)
        self._rule = Rule(optimizer, width, lr)
        self._home = Home(len(first), self._size, int(cache * rows) // self._size, self._rule)
        self._home.records[:, :width] = first
        self._cache = Cache(rows, self._rule.columns)
        self._now: _Batch | None = None
        self._orders: list[Orders] = []
        """By rank: those of this home for the current step."""
        self._told: list[Orders] = []
        """By home: those for this rank."""
        self._coming: _Coming | None = None

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self._rule.lr

    @lr.setter
    def lr(self, value: float) -> None:
        fault = Rule.fault(self._rule.optimizer, value)
        if fault:
            raise ConfigError(f"{self._who}: {fault}")
        self._rule.lr = value

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows `ids`, of any shape, as (*shape, width) on the CPU. They are rows of the current batch.

        Autograd follows them. Raises ConfigError for other rows, or outside the loop over `ahead`.
        """
        batch = self._current()
        flat = ids.detach().cpu().reshape(-1).numpy().astype(np.int64)
        at = np.minimum(np.searchsorted(batch.unique, flat), max(len(batch.unique) - 1, 0))
        if len(flat) and (not len(batch.unique) or (batch.unique[at] != flat).any()):
            wrong = flat[batch.unique[at] != flat][0] if len(batch.unique) else flat[0]
            raise ConfigError(f"{self._who}: row {wrong} is not one of this batch: have `ids` of `ahead` give it")
        places = torch.from_numpy(batch.place[at]).reshape(ids.shape)
        return nn.functional.embedding(places, batch.leaf)

    def step(self) -> None:
        """Changes the rows of this batch by their gradients. All ranks call it, or none, once for a batch."""
        batch = self._current()
        if batch.slopes is not None:
            raise ConfigError(f"{self._who}: step() was called twice for a batch: call it once")
        batch.slopes = torch.zeros_like(batch.leaf) if batch.leaf.grad is None else batch.leaf.grad
        own = np.concatenate([orders.marks for orders in self._told]) != GRADIENT
        rows = batch.rows[own]
        self._cache.put(rows, self._rule.changed(self._cache.get(rows), batch.slopes[torch.from_numpy(own)]))

    def ahead(self, batches: Iterable[Batch], ids: Callable[[Batch], Tensor]) -> Iterator[Batch]:
        """`embedding.ahead` for this table alone."""
        return ahead(batches, {self: ids})

    def flush(self) -> None:
        """All rows return to their homes. All ranks call it; the end of the loop over `ahead` does."""
        self._end_step()
        if self._coming is not None:
            self._coming.work.wait()
            lent = self._coming.batch.early[self._coming.batch.early != ABSENT] == LENT
            rows = self._coming.batch.rows[self._coming.batch.early != ABSENT]
            self._cache.put(rows[lent], self._coming.records[torch.from_numpy(lent)])
            self._coming = None
        held = np.concatenate([self._home.held(rank) for rank in range(self._size)])
        counts = [len(self._home.held(rank)) for rank in range(self._size)]
        numbers = self._exchange(torch.from_numpy(held).reshape(-1, 1), counts, None)
        rows = np.concatenate([part[:, 0].numpy() * self._size + rank for rank, part in enumerate(numbers)])
        records = self._exchange(self._cache.get(rows), [len(part) for part in numbers], counts)
        self._home.records[torch.from_numpy(held)] = torch.cat(records)
        self._cache.drop(rows)
        self._home.forget()
        self._orders = []

    def state_dict(self) -> dict[str, Any]:
        """This rank's rows, of all ranks' steps so far. All ranks call it, outside of the loop over `ahead`."""
        if self._now is not None:
            raise ConfigError(f"{self._who}: the loop over `ahead` is not over: end it, or call flush()")
        return {"records": self._home.records.clone(), "rows": self.rows, "rank": self._rank, "size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the rows of a `state_dict` of the same rank of a group of the same size. Raises ConfigError else."""
        expected = {"rows": self.rows, "rank": self._rank, "size": self._size}
        found = {key: state.get(key) for key in expected}
        if found != expected or state["records"].shape != self._home.records.shape:
            raise ConfigError(f"{self._who}: the state is of {found}, and this table is of {expected}")
        self._home.records.copy_(state["records"])

    def _current(self) -> _Batch:
        if self._now is None:
            raise ConfigError(f"{self._who}: there is no batch: go through `ahead`, and use it within the loop")
        return self._now

    def _learn(self, ids: Tensor | None) -> _Batch | None:
        """Tells the homes about the rank's next batch; None: there is none. Returns None if some rank has none."""
        fault = ""
        if ids is not None:
            if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
                fault = f"ids of {ids.dtype}: give whole numbers"
            elif (wrong := ids[(ids < 0) | (ids >= self.rows)]).numel():
                fault = f"row {int(wrong[0])} is outside of the table: use 0 to {self.rows - 1}"
        own = _Batch(torch.zeros(0, dtype=torch.int64, device="cpu") if ids is None or fault else ids, self._size)
        heard = self._agree(
            f"table {self.name!r} with lr {self.lr}", fault, [(n, int(ids is None)) for n in own.counts]
        )
        if any(ended for _, ended in heard):
            return None
        rows = torch.from_numpy(own.rows // self._size).reshape(-1, 1)
        self._home.learn([part[:, 0].numpy() for part in self._exchange(rows, own.counts, [n for n, _ in heard])])
        return own

    def _turn(self, now: _Batch, after: _Batch | None) -> None:
        """Has the rows of the batch `now` come. Those of `after` that can, begin to."""
        if self._coming is not None:
            self._coming.work.wait()
            self._cache.put(now.rows[now.early != ABSENT], self._coming.records)
            self._coming = None
        lacking = ~self._cache.has(now.rows)
        self.counts.used += len(now.rows)
        self.counts.hits += int(np.count_nonzero(~lacking & (now.early == ABSENT)))
        told = [orders.early for orders in self._orders] or [
            np.zeros(len(self._home.asked(0, rank)), np.uint8) for rank in range(self._size)
        ]
        late = self._home.late(told)
        came = self._exchange(torch.cat(late), [len(part) for part in late], self._by_home(now, lacking))
        self._cache.put(now.rows[lacking], torch.cat(came))
        self._orders = self._home.orders()
        self._hear(now, after)
        now.leaf = self._cache.get(now.rows)[:, : self.width].clone().requires_grad_()
        self._now = now
        if after is not None:
            sent = self._home.early(self._orders)
            expected = self._by_home(after, after.early != ABSENT)
            self._coming = _Coming(*self._start(torch.cat(sent), [len(part) for part in sent], expected), after)

    def _hear(self, now: _Batch, after: _Batch | None) -> None:
        """The homes' orders for this rank."""
        sizes = torch.tensor([[len(orders.leaving)] for orders in self._orders], dtype=torch.int64, device="cpu")
        leaving = [int(part[0, 0]) for part in self._exchange(sizes, [1] * self._size, [1] * self._size)]
        marks = [np.concatenate([orders.marks, orders.early]) for orders in self._orders]
        counts = [n + m for n, m in zip(now.counts, after.counts if after else [0] * self._size, strict=True)]
        heard = self._exchange(
            torch.from_numpy(np.concatenate(marks)).reshape(-1, 1), [len(part) for part in marks], counts
        )
        going = torch.from_numpy(np.concatenate([orders.leaving for orders in self._orders])).reshape(-1, 1)
        left = self._exchange(going, [len(orders.leaving) for orders in self._orders], leaving)
        self._told = []
        for home, count in enumerate(now.counts):
            both = heard[home][:, 0].numpy()
            self._told.append(Orders(both[:count], both[count:], left[home][:, 0].numpy()))
        if after is not None:
            after.early = np.concatenate([orders.early for orders in self._told])

    def _end_step(self) -> None:
        """Sends what the homes need after a step: records that return, and gradients."""
        batch, self._now = self._now, None
        if batch is None or not self._told:
            return
        first = 0
        returning: list[NDArray[np.int64]] = []
        gradients: list[Tensor] = []
        dropped: list[NDArray[np.int64]] = []
        slopes = (
            torch.zeros(len(batch.rows), self.width, dtype=torch.float32, device="cpu")
            if batch.slopes is None
            else batch.slopes
        )
        for home, (marks, _, leaving) in enumerate(self._told):
            rows = batch.rows[first : first + len(marks)]
            returning.append(np.concatenate([rows[marks == RETURN], leaving * self._size + home]))
            gradients.append(slopes[first : first + len(marks)][torch.from_numpy(marks == GRADIENT)])
            dropped += [returning[-1], rows[marks == GRADIENT]]
            first += len(marks)
        self._told = []
        sent = [self._cache.get(rows) for rows in returning]
        back = [int(np.count_nonzero(orders.marks == RETURN)) + len(orders.leaving) for orders in self._orders]
        summed = [int(np.count_nonzero(orders.marks == GRADIENT)) for orders in self._orders]
        returned = self._exchange(torch.cat(sent), [len(part) for part in sent], back)
        arrived = self._exchange(torch.cat(gradients), [len(part) for part in gradients], summed)
        self._home.end(self._orders, returned, arrived)
        self._cache.drop(np.concatenate(dropped))

    def _by_home(self, batch: _Batch, chosen: NDArray[np.bool_]) -> list[int]:
        return [int(count) for count in np.bincount(batch.rows[chosen] % self._size, minlength=self._size)]

    def _drawn(self, count: int) -> Tensor:
        """First values. Ranks often have one seed, and must not have the same rows."""
        seed = zlib.crc32(f"{torch.initial_seed()} {self.name} {self._rank}".encode())
        return (
            torch.randn(
                count, self.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
            )
            * 0.01
        )

    def _agree(self, kind: str, fault: str = "", numbers: list[tuple[int, int]] | None = None) -> list[tuple[int, int]]:
        """Compares calls, and exchanges two numbers with each rank. Raises the errors of `agreement.check`."""
        own = facts(kind, fault)
        told = torch.tensor(
            [[*pair, *own] for pair in numbers or [(0, 0)] * self._size], dtype=torch.int64, device="cpu"
        )
        parts = self._exchange(told, [1] * self._size, [1] * self._size)
        heard = [part[0].tolist() for part in parts]
        check(self._group, "embedding.Remote", kind, fault, [line[-FACTS:] for line in heard])
        return [(line[0], line[1]) for line in heard]

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int] | None) -> list[Tensor]:
        """Sends `sent[r]` of the rows to rank r; returns the `received[r]` rows of each. None: they ask first."""
        if received is None:
            ones = [1] * self._size
            received = [
                int(part[0, 0])
                for part in self._exchange(
                    torch.tensor(sent, dtype=torch.int64, device="cpu").reshape(-1, 1), ones, ones
                )
            ]
        work, output = self._start(rows, sent, received)
        work.wait()
        return list(output.split(received))

    def _start(self, rows: Tensor, sent: list[int], received: list[int]) -> tuple[Work, Tensor]:
        output = rows.new_empty((sum(received), rows.shape[1]))
        self.counts.sent_bytes += (len(rows) - sent[self._rank]) * rows.shape[1] * rows.element_size()
        return start(output, rows.contiguous(), Route(self._group, sent, received, EXACT), async_op=True), output


def ahead(batches: Iterable[Batch], tables: Mapping[Remote, Callable[[Batch], Tensor]]) -> Iterator[Batch]:
    """The batches, each when its rows are here. `tables[table](batch)` gives the rows that it uses, whole numbers.

    All ranks of the tables' group go through it, with the tables in the same order. It reads ahead as many batches as
    the table with the smallest `lookahead`. It ends on all ranks after as many batches as the rank with the fewest has;
    whoever leaves the loop earlier does so on all ranks, and calls `flush` of each table. Rows change only in `step`.

    Raises ConfigError without a table, and for rows outside of one (on the other ranks: MismatchError).
    """
    if not tables:
        raise ConfigError("embedding.ahead: no tables; give each table with the function that returns its rows")
    for table in tables:
        if table._now is not None:
            table.flush()
    source = iter(batches)
    read: collections.deque[tuple[Batch, list[_Batch]]] = collections.deque()
    distance, is_open = min(table.lookahead for table in tables), True
    while True:
        for table in tables:
            table._end_step()
        while is_open and len(read) <= distance:
            taken = list(itertools.islice(source, 1))
            learned = [table._learn(ids(taken[0]) if taken else None) for table, ids in tables.items()]
            rows = [ids for ids in learned if ids is not None]
            is_open = len(rows) == len(learned)
            if is_open:
                read.append((taken[0], rows))
        if not read:
            for table in tables:
                table.flush()
            return
        for place, table in enumerate(tables):
            table._turn(read[0][1][place], read[1][1][place] if len(read) > 1 else None)
        yield read.popleft()[0]
