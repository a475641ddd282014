"""`Home`: a rank's share of the rows of a table, which knows who uses them in the steps to come.

It decides where each row is. A row that one rank alone uses next stays in the cache of that rank, where its gradients
change it; a row that several ranks use in a step is here, and gets the sum of their gradients. Nothing here
communicates: `remote` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .rule import Rule

Rows = NDArray[np.int64]
"""Numbers of rows among those of one home, ascending."""

NOBODY = -1
SHARED = -2
NEVER = 1 << 40

KEEP, RETURN, GRADIENT = 0, 1, 2
"""What becomes of a row after a step: it stays in the cache; its record returns; its gradient is sent, and it goes."""

ABSENT, LENT, COPY = 0, 1, 2
"""A row of the next step: it does not come now; it comes and is this rank's; it comes, and others have it, too."""


class Orders(NamedTuple):
    """What a home tells a rank in a step."""

    marks: NDArray[np.uint8]
    """KEEP, RETURN or GRADIENT for each row that the rank has asked for in this step."""
    early: NDArray[np.uint8]
    """ABSENT, LENT or COPY for each row that it has asked for in the next step."""
    leaving: Rows
    """Other rows of its cache, which return after this step."""


@dataclasses.dataclass
class _Uses:
    """The uses of this home's rows in one step."""

    asked: Sequence[Rows]
    """By rank: its rows."""
    rows: Rows
    """All of them, once each."""
    user: NDArray[np.int64]
    """The rank that uses the row, or SHARED."""
    next_step: NDArray[np.int64]
    """The step of its next use, NEVER if none is known."""
    next_user: NDArray[np.int64]


class Home:
    """`count` rows. Each of `size` ranks may keep at most `quota` of them between steps."""

    def __init__(self, count: int, size: int, quota: int, rule: Rule) -> None:
        self.records = torch.zeros(count, rule.columns, dtype=torch.float32, device="cpu")
        """The values of rows that are here."""
        self._size, self._quota, self._rule = size, quota, rule
        self.holder = np.full(count, NOBODY, np.int64)
        """By row: the rank that has it; NOBODY: this home."""
        self._uses: dict[int, _Uses] = {}
        self._step = self._known = 0
        self._next = np.full(count, NEVER, np.int64)
        """By row: the step of its next use, among those to come."""
        self._last = np.full((2, count), -1, np.int64)
        """By row: its last known use: step, and place among the rows of that step."""
        self._frequency = np.zeros(count, np.int64)
        self._recalled: list[Rows] = []
        self._lent = [np.zeros(0, np.int64) for _ in range(size)]
        """By rank: the rows that it has, each once."""
        self._used = np.full(count, -1, np.int64)
        """By row: the last step with orders that used it."""
        self._flag = np.zeros(count, bool)
        """All False, but within a call."""

    def learn(self, asked: Sequence[Rows]) -> None:
        """The rows that each rank uses in the next step that is not known yet."""
        step, self._known = self._known, self._known + 1
        ranks = np.repeat(np.arange(self._size), [len(rows) for rows in asked])
        rows, first, users = np.unique(np.concatenate(asked), return_index=True, return_counts=True)
        user = np.where(users == 1, ranks[first], SHARED) if len(rows) else np.zeros(0, np.int64)
        never = np.full(len(rows), NEVER, np.int64)
        self._uses[step] = _Uses(asked, rows, user, never, never.copy())
        before, place = self._last[:, rows]
        for earlier in np.unique(before[before >= self._step]):
            these = before == earlier
            self._uses[earlier].next_step[place[these]] = step
            self._uses[earlier].next_user[place[these]] = user[these]
        idle = before < self._step
        self._next[rows[idle]] = step
        holder = self.holder[rows]
        self._recalled.append(rows[idle & (holder != NOBODY) & (holder != user)])
        self._last[0, rows], self._last[1, rows] = step, np.arange(len(rows))

    def asked(self, step: int, rank: int) -> Rows:
        """The rows that a rank uses in a step; none if the step is not known."""
        uses = self._uses.get(step)
        return np.zeros(0, np.int64) if uses is None else uses.asked[rank]

    def late(self, early: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """By rank: the records that it lacks for this step. `early[r]`: what rank r was told of it a step ago."""
        uses, found = self._uses[self._step], []
        for rank, rows in enumerate(uses.asked):
            lacking = rows[(self.holder[rows] != rank) & (early[rank] == ABSENT)]
            found.append(self.records[torch.from_numpy(lacking)])
        alone = uses.user != SHARED
        self._lend(uses.rows[alone], uses.user[alone])
        return found

    def orders(self) -> list[Orders]:
        """By rank: what becomes of the rows of this step, and which of the next step come already. Ends the step."""
        uses = self._uses[self._step]
        self._next[uses.rows] = uses.next_step
        self._frequency[uses.rows] += 1
        self._used[uses.rows] = self._step
        leaving = self._leaving(uses)
        self._flag[leaving] = True
        marks = np.where(uses.user == SHARED, GRADIENT, np.where(self._flag[uses.rows], RETURN, KEEP)).astype(np.uint8)
        self._flag[leaving] = False
        others = np.sort(leaving[self._used[leaving] != self._step])
        after = self._uses.get(self._step + 1)
        comes = np.zeros(0, np.uint8)
        if after is not None:
            stays = (self.holder[after.rows] == NOBODY) & (self._used[after.rows] != self._step)
            comes = np.where(stays, np.where(after.user == SHARED, COPY, LENT), ABSENT).astype(np.uint8)
        found = []
        for rank in range(self._size):
            of_rank = marks[np.searchsorted(uses.rows, uses.asked[rank])]
            early = np.zeros(0, np.uint8)
            if after is not None:
                early = comes[np.searchsorted(after.rows, after.asked[rank])]
            found.append(Orders(of_rank, early, others[self.holder[others] == rank]))
        if after is not None:
            lent = comes == LENT
            self._lend(after.rows[lent], after.user[lent])
        return found

    def early(self, orders: Sequence[Orders]) -> list[Tensor]:
        """By rank: the records of the next step that `orders` has announced."""
        found = []
        for rank, (_, early, _) in enumerate(orders):
            found.append(self.records[torch.from_numpy(self.asked(self._step + 1, rank)[early != ABSENT])])
        return found

    def end(self, orders: Sequence[Orders], returned: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """By rank: the records that return after the step, those marked and then those leaving, and its gradients."""
        uses = self._uses.pop(self._step)
        shared = np.flatnonzero(uses.user == SHARED)
        total = torch.zeros(len(shared), self._rule.width, dtype=torch.float32, device="cpu")
        for rank, (marks, _, leaving) in enumerate(orders):
            rows = np.concatenate([uses.asked[rank][marks == RETURN], leaving])
            self.records[torch.from_numpy(rows)] = returned[rank]
            self.holder[rows] = NOBODY
            place = np.searchsorted(uses.rows[shared], uses.asked[rank][marks == GRADIENT])
            total.index_add_(0, torch.from_numpy(place), gradients[rank])
            self._lent[rank] = self._lent[rank][self.holder[self._lent[rank]] == rank]
        summed = torch.from_numpy(uses.rows[shared])
        self.records[summed] = self._rule.changed(self.records[summed], total)
        self._step += 1

    def held(self, rank: int) -> Rows:
        """The rows that a rank has."""
        return np.sort(self._lent[rank])

    def forget(self) -> None:
        """All rows are here again, and no use is known."""
        self.holder.fill(NOBODY)
        self._uses, self._recalled = {}, []
        self._step = self._known = 0
        self._next.fill(NEVER)
        self._last.fill(-1)
        self._used.fill(-1)
        self._lent = [np.zeros(0, np.int64) for _ in range(self._size)]

    def _lend(self, rows: Rows, ranks: NDArray[np.int64]) -> None:
        new = self.holder[rows] != ranks
        self.holder[rows] = ranks
        for rank in range(self._size):
            self._lent[rank] = np.concatenate([self._lent[rank], rows[new & (ranks == rank)]])

    def _leaving(self, uses: _Uses) -> Rows:
        """The rows, in any order, that leave the rank that has them after this step."""
        recalled = np.concatenate([*self._recalled, np.zeros(0, np.int64)])
        recalled = recalled[self.holder[recalled] != NOBODY]
        self._recalled = []
        elsewhere = (uses.user != SHARED) & (uses.next_user != NEVER) & (uses.next_user != uses.user)
        found = [recalled, uses.rows[elsewhere]]
        gone = np.concatenate(found)
        self._flag[gone] = True
        for held in self._lent:
            kept = held[~self._flag[held]]
            if len(kept) > self._quota:
                # Belady's choice: those leave that are needed last. Beyond the known steps, those that are rarely used.
                need = np.where(self._next[kept] < NEVER, self._next[kept], 2 * NEVER - self._frequency[kept])
                found.append(kept[np.argsort(need, kind="stable")[self._quota :]])
        self._flag[gone] = False
        return np.concatenate(found)
