"""Frontiers against every combination of configurations."""

from __future__ import annotations

import math
from itertools import pairwise
from itertools import product as combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.planner.frontier import Point, chain, product, reduce, union

small = st.integers(0, 6)
points = st.builds(lambda *costs: Point(*costs), small, small, small)


def beaten(costs: tuple[float, ...], by: tuple[float, ...]) -> bool:
    return by != costs and all(b <= a for a, b in zip(costs, by, strict=True))


def best_of(all_points: list[Point]) -> set[tuple[float, ...]]:
    costs = {point.costs for point in all_points}
    return {each for each in costs if not any(beaten(each, other) for other in costs)}


@given(st.lists(points, max_size=30))
def test_reduce_keeps_what_nothing_beats(given_points: list[Point]) -> None:
    kept = reduce(given_points)
    assert {point.costs for point in kept} == best_of(given_points)
    assert len({point.costs for point in kept}) == len(kept)
    assert kept == sorted(kept)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_chain_is_exhaustive(data: st.DataObject, length: int) -> None:
    """Up to 5 operators of up to 3 configurations, and re-sharding between each two."""
    counts = data.draw(st.lists(st.integers(1, 3), min_size=length, max_size=length))
    operators = [
        [data.draw(points)._replace(choices=(f"{i}.{c}",)) for c in range(count)] for i, count in enumerate(counts)
    ]
    edges = [[[data.draw(points) for _ in range(b)] for _ in range(a)] for a, b in pairwise(counts)]

    def total(chosen: tuple[int, ...]) -> Point:
        parts = [operators[i][c] for i, c in enumerate(chosen)]
        parts += [edges[i][a][b] for i, (a, b) in enumerate(pairwise(chosen))]
        time_s, memory_bytes, link_bytes = map(sum, zip(*(part.costs for part in parts), strict=True))
        return Point(time_s, memory_bytes, link_bytes)

    frontier = chain(operators, edges)
    every = [total(chosen) for chosen in combinations(*(range(count) for count in counts))]
    assert {point.costs for point in frontier} == best_of(every)
    for point in frontier:
        chosen = tuple(int(choice.partition(".")[2]) for choice in point.choices)
        assert total(chosen).costs == point.costs


def test_product_and_union() -> None:
    fast, small_one = Point(1, 9, 0, ("fast",)), Point(4, 2, 0, ("small",))
    assert product([fast, small_one], [Point(1, 1, 1, ("next",))]) == [
        Point(2, 10, 1, ("fast", "next")),
        Point(5, 3, 1, ("small", "next")),
    ]
    assert union([[fast], [small_one, Point(5, 9, 0)]]) == [fast, small_one]


def test_an_empty_chain_costs_nothing() -> None:
    assert chain([], []) == [Point(0, 0, 0)]


def test_bad_input_is_named() -> None:
    point = Point(1, 1, 1)
    with pytest.raises(ConfigError, match="0 edge tables do not fit 2 operators"):
        chain([[point], [point]], [])
    with pytest.raises(ConfigError, match="operator 1 has no configuration"):
        chain([[point], []], [[[]]])
    with pytest.raises(ConfigError, match="edge table 0 does not have 1 rows of 2"):
        chain([[point], [point, point]], [[[point]]])
    with pytest.raises(ConfigError, match="has a cost that is not finite"):
        chain([[Point(1, math.inf, 1)]], [])
