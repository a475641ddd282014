"""`Hop`: rows go once to each rank that has, or passes on to, one of their experts; sums of rows come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import Policy
from .agreement import FACTS, check, facts
from .exchange import Route, exchange, start

CALLER = "experts.dispatch"

EXACT = Policy()

_KEPT_FLOATS = (torch.float32, torch.float64)
"""Types in which sums are made; those of others are made in float32."""


class Choices(NamedTuple):
    """Choices of experts for the rows of this rank: choice i sends row `row[i]` to expert `expert[i]`. On the CPU."""

    row: Tensor
    expert: Tensor


class Told(NamedTuple):
    """What the ranks of a hop tell each other, see `agreement`."""

    kind: str
    fault: str = ""


class Hop:
    """One exchange of a dispatch. Rows with choices of several ranks go to each of these ranks, once."""

    def __init__(
        self, group: dist.ProcessGroup, among: Sequence[int], rows: int, choices: Choices, to: Tensor, told: Told
    ) -> None:
        """Agrees on the numbers of rows, and sends the choices. All ranks of the group call it.

        `among`: the ranks that this one may exchange rows with, ascending. `rows`: their number on this rank; `to`: the
        rank to which each choice goes. Raises the errors of `agreement.check`.
        """
        self._group = group
        self._rows = rows
        size = group.size()
        copies, copy_of = torch.unique(to * max(rows, 1) + choices.row, return_inverse=True)
        self._origin = copies % max(rows, 1)
        """The row of which each sent row is a copy. These are sorted by rank, as are the choices in this order:"""
        self._order = torch.argsort(copy_of, stable=True)
        sent = torch.bincount(copies // max(rows, 1), minlength=size)
        choices_sent = torch.bincount(to, minlength=size)
        received, choices_received = _numbers(group, among, sent, choices_sent, told)
        self.sent, self.received = sent.tolist(), received.tolist()
        """Rows to each rank, and from it."""
        self._choices_sent, self._choices_received = choices_sent.tolist(), choices_received.tolist()
        ordered = to[self._order]
        place = copy_of[self._order] - (sent.cumsum(0) - sent)[ordered]  # among the rows for that rank
        pairs = torch.stack([place, choices.expert[self._order]], 1).to(torch.int32)
        heard = pairs.new_empty((sum(self._choices_received), 2))
        start(heard, pairs, Route(group, self._choices_sent, self._choices_received, EXACT), async_op=False).wait()
        first = torch.repeat_interleave(received.cumsum(0) - received, choices_received)
        self.choices = Choices(heard[:, 0] + first, heard[:, 1].long())
        """Those of the rows that have arrived."""

    def go(self, rows: Tensor, weights: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
        """The rows that arrive at this rank, and the weights of their choices. `weights`: of the choices here."""
        device = rows.device
        routes = [
            Route(self._group, self.sent, self.received, policy),
            Route(self._group, self._choices_sent, self._choices_received, EXACT),
        ]
        copies = rows.index_select(0, self._origin.to(device))
        arrived, their_weights = exchange(routes, copies, weights.index_select(0, self._order.to(device)))
        return arrived, their_weights

    def back(self, rows: Tensor, policy: Policy) -> Tensor:
        """The sum of the rows that come back for each row that has left this rank."""
        (arrived,) = exchange([Route(self._group, self.received, self.sent, policy)], rows)
        return sums(arrived, self._origin, self._rows)


def sums(rows: Tensor, to: Tensor, count: int) -> Tensor:
    """`count` rows, each of which is the sum of the rows that `to` sends there; made in float32 at least."""
    wide = rows.dtype if rows.dtype in _KEPT_FLOATS else torch.float32
    zeros = rows.new_zeros((count, *rows.shape[1:]), dtype=wide)
    return zeros.index_add(0, to.to(rows.device), rows.to(wide)).to(rows.dtype)


def _numbers(
    group: dist.ProcessGroup, among: Sequence[int], sent: Tensor, choices_sent: Tensor, told: Told
) -> tuple[Tensor, Tensor]:
    """The rows and the choices that each rank sends here. Raises the errors of `agreement.check`."""
    size = group.size()
    own = torch.tensor(facts(told.kind, told.fault), dtype=torch.int64, device="cpu").expand(size, FACTS)
    numbers = torch.cat([sent.view(-1, 1), choices_sent.view(-1, 1), own], 1)
    ones = [int(rank in among) for rank in range(size)]
    heard = numbers.new_empty((len(among), 2 + FACTS))
    start(heard, numbers[list(among)], Route(group, ones, ones, EXACT), async_op=False).wait()
    check(group, CALLER, told.kind, told.fault, heard[:, 2:].tolist())
    found = numbers.new_zeros((2, size))
    found[:, list(among)] = heard[:, :2].t()
    return found[0], found[1]
