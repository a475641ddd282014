"""Layers and micro-batches among unequal owners, against every division."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.planner.spread import Owner, even, spread, step_s


def divisions(total: int, owners: int) -> Iterator[tuple[int, ...]]:
    """All divisions of `total` items in which each owner has one at least."""
    if owners == 1:
        yield (total,)
        return
    for first in range(1, total - owners + 2):
        for rest in divisions(total - first, owners - 1):
            yield (first, *rest)


OWNERS = st.lists(
    st.builds(
        Owner,
        *(st.integers(1, 9), st.integers(0, 4), st.integers(0, 9), st.integers(0, 4), st.integers(0, 20)),
        *(st.integers(0, 9), st.integers(1, 9)),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(OWNERS, st.integers(1, 9), st.integers(1, 6), st.integers(0, 5))
def test_the_division_is_the_best_of_all(owners: list[Owner], total: int, count: int, fill_s: int) -> None:
    every = [
        step_s(owners, items, count, fill_s)
        for items in (divisions(total, len(owners)) if total >= len(owners) else ())
        if all(n <= owner.most for n, owner in zip(items, owners, strict=True))
    ]
    found = spread(owners, total, count, fill_s)
    if found is None:
        assert every == []
    else:
        assert step_s(owners, found, count, fill_s) == pytest.approx(min(every))
        assert sum(found) == total
        assert all(1 <= n <= owner.most for n, owner in zip(found, owners, strict=True))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4), st.integers(0, 6))
def test_even_is_the_least_of_the_largest(weights: list[tuple[int, int]], more: int) -> None:
    total = len(weights) + more
    items, most = even(weights, total)
    assert sum(items) == total
    assert most == max(a + b * n for (a, b), n in zip(weights, items, strict=True))
    assert most == min(
        max(a + b * n for (a, b), n in zip(weights, division, strict=True))
        for division in divisions(total, len(weights))
    )


def test_a_pipeline_of_unequal_stages() -> None:
    """Two micro-batches; the fast stage takes 4 of 6 layers: 2 x 4 s through each, and 4 s to fill the other."""
    owners = [Owner(1, fill_item_s=1), Owner(2, fill_item_s=2)]
    assert spread(owners, 6, 2) == (4, 2)
    assert step_s(owners, (4, 2), 2) == 12


def test_large_divisions_are_quick() -> None:
    owners = [Owner(1 + 0.01 * number, 0.1, 1 + 0.01 * number, 0.1, 1.0, 0.0, 30 - number % 5) for number in range(16)]
    found = spread(owners, 128, 64)
    assert found is not None
    assert sum(found) == 128
