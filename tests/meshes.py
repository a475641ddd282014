"""Layers of a transformer on virtual ranks, in one process: each layout's own algorithm, on collectives that count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

Shards = list[Tensor]
"""A tensor of each rank."""
Groups = list[tuple[int, ...]]
"""The group of each rank, in its order."""


def groups(dims: Sequence[int], axis: int) -> Groups:
    """The ranks of a mesh that differ from each rank only in one coordinate; the last coordinate changes fastest."""
    places = list(product(*(range(size) for size in dims)))
    return [tuple(places.index((*place[:axis], k, *place[axis + 1 :])) for k in range(dims[axis])) for place in places]


class Virtual:
    """Collectives of virtual ranks, message by message. Counts the bytes and messages that each rank receives."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[int, tuple[int, ...]]] = Counter()
        """The bytes received, by rank and group."""
        self.messages: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def receive(self, rank: int, group: tuple[int, ...], source: int, part: Tensor) -> Tensor:
        """`part`, which `source` sends to `rank`."""
        if source != rank:
            self.bytes[rank, group] += part.nbytes
            self.messages[rank, group] += 1
        return part

    def all_gather(self, shards: Shards, groups: Groups, dim: int) -> Shards:
        return [
            torch.cat([self.receive(rank, group, member, shards[member]) for member in group], dim)
            for rank, group in enumerate(groups)
        ]

    def reduce_scatter(self, values: Shards, groups: Groups, dim: int) -> Shards:
        found = []
        for rank, group in enumerate(groups):
            parts = [values[member].chunk(len(group), dim)[group.index(rank)] for member in group]
            found.append(sum(self.receive(rank, group, e, p) for e, p in zip(group, parts, strict=True)))
        return found  # type: ignore[return-value]

    def all_reduce(self, values: Shards, groups: Groups) -> Shards:
        flat = self.reduce_scatter([value.flatten() for value in values], groups, 0)
        return [f.view(v.shape) for f, v in zip(self.all_gather(flat, groups, 0), values, strict=True)]

    def all_to_all(self, parts: list[Shards], groups: Groups) -> list[Shards]:
        """`parts[r][k]` goes from rank r to the k-th of its group."""
        return [
            [self.receive(rank, group, member, parts[member][group.index(rank)]) for member in group]
            for rank, group in enumerate(groups)
        ]


class Linear(ABC):
    """Y = X A on a mesh: `forward` of every rank's X, `backward` of every rank's dY; `gradient` is that of A."""

    gradient: Shards

    @abstractmethod
    def forward(self, x: Shards) -> Shards: ...

    @abstractmethod
    def backward(self, dy: Shards) -> Shards: ...


class Columns(Linear):
    """1-D: A by columns, X whole. The gradient of X is added up."""

    def __init__(self, ranks: Virtual, size: int, a: Tensor) -> None:
        self.ranks, self.groups, self.a = ranks, groups((size,), 0), list(a.chunk(size, 1))

    def forward(self, x: Shards) -> Shards:
        self.x = x
        return [block @ a for block, a in zip(x, self.a, strict=True)]

    def backward(self, dy: Shards) -> Shards:
        self.gradient = [x.T @ block for x, block in zip(self.x, dy, strict=True)]
        return self.ranks.all_reduce([block @ a.T for block, a in zip(dy, self.a, strict=True)], self.groups)


class Rows(Columns):
    """1-D: A by rows, X by columns. Y is added up."""

    def __init__(self, ranks: Virtual, size: int, a: Tensor) -> None:
        self.ranks, self.groups, self.a = ranks, groups((size,), 0), list(a.chunk(size, 0))

    def forward(self, x: Shards) -> Shards:
        return self.ranks.all_reduce(super().forward(x), self.groups)

    def backward(self, dy: Shards) -> Shards:
        self.gradient = [x.T @ block for x, block in zip(self.x, dy, strict=True)]
        return [block @ a.T for block, a in zip(dy, self.a, strict=True)]


class Square(Linear):
    """2-D and 2.5-D: ranks (k, i, j); X has rows (k, i) and columns j, A rows i and columns j."""

    def __init__(self, ranks: Virtual, q: int, depth: int, a: Tensor, *, kept: bool) -> None:
        self.ranks, self.kept, self.depth = ranks, kept, depth
        dims = (depth, q, q)
        self.along_row, self.along_column, self.along_depth = groups(dims, 2), groups(dims, 1), groups(dims, 0)
        self.a = [a.chunk(q, 0)[i].chunk(q, 1)[j] for _, i, j in product(range(depth), range(q), range(q))]

    def _panels(self, x: Shards) -> tuple[Shards, Shards]:
        return self.ranks.all_gather(x, self.along_row, 1), self.ranks.all_gather(self.a, self.along_column, 0)

    def forward(self, x: Shards) -> Shards:
        self.x, self.panels = x, self._panels(x)
        return [x @ a for x, a in zip(*self.panels, strict=True)]

    def backward(self, dy: Shards) -> Shards:
        x, a = self.panels if self.kept else self._panels(self.x)
        partial = [panel.T @ block for panel, block in zip(x, dy, strict=True)]
        self.gradient = self.ranks.reduce_scatter(partial, self.along_column, 0)
        if self.depth > 1:
            self.gradient = self.ranks.all_reduce(self.gradient, self.along_depth)
        return self.ranks.reduce_scatter([e @ p.T for e, p in zip(dy, a, strict=True)], self.along_row, 1)


class Cube(Linear):
    """3-D: ranks (i, j, l). X has rows (i, l) and columns j, A rows (j, i) and columns l, Y rows (i, j) and columns l.

    With `is_odd` j and l change places, so that it takes the output of an even one.
    """

    def __init__(self, ranks: Virtual, q: int, a: Tensor, *, is_odd: bool, kept: bool) -> None:
        self.ranks, self.kept = ranks, kept
        dims = (q, q, q)
        self.along_i, self.along_j, self.along_l = groups(dims, 0), groups(dims, 1), groups(dims, 2)
        if is_odd:
            self.along_j, self.along_l = self.along_l, self.along_j
        self.a = []
        for i, j, l in product(range(q), range(q), range(q)):  # noqa: E741
            row, column = (l, j) if is_odd else (j, l)
            self.a.append(a.chunk(q, 0)[row].chunk(q, 1)[column].chunk(q, 0)[i])

    def _panels(self, x: Shards) -> tuple[Shards, Shards]:
        return self.ranks.all_gather(x, self.along_l, 0), self.ranks.all_gather(self.a, self.along_i, 0)

    def forward(self, x: Shards) -> Shards:
        self.x, self.panels = x, self._panels(x)
        return self.ranks.reduce_scatter([x @ a for x, a in zip(*self.panels, strict=True)], self.along_j, 0)

    def backward(self, dy: Shards) -> Shards:
        x, a = self.panels if self.kept else self._panels(self.x)
        dy = self.ranks.all_gather(dy, self.along_j, 0)
        partial = [panel.T @ block for panel, block in zip(x, dy, strict=True)]
        self.gradient = self.ranks.reduce_scatter(partial, self.along_i, 0)
        return self.ranks.reduce_scatter([e @ p.T for e, p in zip(dy, a, strict=True)], self.along_l, 0)


def attention(x: Tensor, length: int, head_width: int) -> Tensor:
    """Causal attention of whole sequences. Columns of `x`: for each head its query, key and value."""
    heads = x.shape[1] // (3 * head_width)
    q, k, v = x.view(-1, length, heads, 3, head_width).permute(3, 0, 2, 1, 4)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.permute(0, 2, 1, 3).reshape(x.shape[0], -1)


def layer(linears: Sequence[Linear], x: Shards, dy: Shards, local: Callable[[Tensor], Tensor]) -> tuple[Shards, Shards]:
    """Output and input gradient of a layer without norms, on every rank; `local` is its attention."""
    between = (local, None, torch.nn.functional.gelu, None)
    inputs, outputs, values, skip = [], [], x, x
    for linear, function in zip(linears, between, strict=True):
        values = [value.detach() for value in linear.forward(values)]
        if function is not None:
            inputs.append([value.requires_grad_() for value in values])
            outputs.append([function(value) for value in values])
            values = [value.detach() for value in outputs[-1]]
        else:
            values = skip = [a + b for a, b in zip(values, skip, strict=True)]
    gradient = dy
    for first in (2, 0):
        inner = linears[first + 1].backward(gradient)
        at, out = inputs.pop(), outputs.pop()
        inner = [torch.autograd.grad(o, i, g)[0] for o, i, g in zip(out, at, inner, strict=True)]
        gradient = [a + b for a, b in zip(gradient, linears[first].backward(inner), strict=True)]
    return values, gradient
