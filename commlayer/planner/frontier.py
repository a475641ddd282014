"""Pareto frontiers over time, memory and bytes on slow links (FT of TensorOpt, arXiv 2004.10856).

A frontier is the set of choices that no other choice beats in every respect. Frontiers of a chain of operators are made
from those of its operators by product (both), sum (either) and reduce (drop what is beaten), exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import ConfigError


class Point(NamedTuple):
    """Costs of some choices."""

    time_s: float
    memory_bytes: float
    link_bytes: float
    choices: tuple[str, ...] = ()

    @property
    def costs(self) -> tuple[float, float, float]:
        return self[:3]


Frontier = list[Point]


def reduce(points: Iterable[Point]) -> Frontier:
    """The points that no other point equals or beats in time, memory and bytes, by ascending time.

    Of points with equal costs, the one with the smallest choices stays. O(n log n) comparisons: the points so far, as a
    staircase of memory and bytes.
    """
    result: Frontier = []
    memory: list[float] = []  # ascending
    link: list[float] = []  # the least bytes at this memory, descending
    for point in sorted(points):
        place = bisect_right(memory, point.memory_bytes)
        if place and link[place - 1] <= point.link_bytes:
            continue
        result.append(point)
        end = place
        while end < len(link) and link[end] >= point.link_bytes:
            end += 1
        memory[place:end], link[place:end] = [point.memory_bytes], [point.link_bytes]
    return result


def product(one: Iterable[Point], other: Iterable[Point]) -> Frontier:
    """Both together: every pair, costs added, choices one after the other. FT's product, reduced."""
    others = list(other)
    return reduce(
        Point(a.time_s + b.time_s, a.memory_bytes + b.memory_bytes, a.link_bytes + b.link_bytes, a.choices + b.choices)
        for a in one
        for b in others
    )


def union(frontiers: Iterable[Iterable[Point]]) -> Frontier:
    """Any one of the frontiers: FT's sum, reduced."""
    return reduce(point for frontier in frontiers for point in frontier)


def chain(operators: Sequence[Sequence[Point]], edges: Sequence[Sequence[Sequence[Point]]]) -> Frontier:
    """The frontier of a chain of operators, each in one of its configurations.

    Args:
        operators: the configurations of each operator.
        edges: `edges[i][a][b]`, the cost between configuration a of operator i and b of operator i + 1 (re-sharding).

    Linear dynamic programming (FT-LDP): for each configuration of the operator reached so far, the frontier of all
    choices before it.

    Raises:
        ConfigError: an operator without configurations, an edge table of the wrong size, or a cost that is no number.
    """
    _check(operators, edges)
    if not operators:
        return [Point(0.0, 0.0, 0.0)]
    ending = [[point] for point in operators[0]]
    for configurations, table in zip(operators[1:], edges, strict=True):
        ending = [
            product(union(product(ending[a], [row[b]]) for a, row in enumerate(table)), [point])
            for b, point in enumerate(configurations)
        ]
    return union(ending)


def _check(operators: Sequence[Sequence[Point]], edges: Sequence[Sequence[Sequence[Point]]]) -> None:
    if len(edges) != max(len(operators) - 1, 0):
        raise ConfigError(f"{len(edges)} edge tables do not fit {len(operators)} operators; give one between each two")
    for index, configurations in enumerate(operators):
        if not configurations:
            raise ConfigError(f"operator {index} has no configuration; give at least one Point")
    for index, table in enumerate(edges):
        rows, columns = len(operators[index]), len(operators[index + 1])
        if len(table) != rows or any(len(row) != columns for row in table):
            raise ConfigError(f"edge table {index} does not have {rows} rows of {columns}; give a Point for each pair")
    points = [*(p for each in operators for p in each), *(p for table in edges for row in table for p in row)]
    for point in points:
        if not all(math.isfinite(cost) for cost in point.costs):
            raise ConfigError(f"{point} has a cost that is not finite; leave out the configuration instead")
