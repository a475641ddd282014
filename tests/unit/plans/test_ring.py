from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.plans import ring
from commlayer.plans.plan import StepKind
from commlayer.plans.settings import Settings
from commlayer.transport.base import Op

SIZES = (0, 1, 2, 7, 61, 128, 251)
WORLDS = (2, 3, 4, 9)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("n", WORLDS)
def test_table(conform: Callable[..., Any], n: int, numel: int) -> None:
    s = Settings(segment_bytes=100)
    conform("all_reduce", lambda r: ring.all_reduce(r, n, numel, 8, n, s), n, numel, average=True)
    numel = -(-numel // n)
    conform("reduce_scatter", lambda r: ring.reduce_scatter(r, n, numel, 8, n, s), n, numel, average=True)
    conform("all_gather", lambda r: ring.all_gather(r, n, numel, 8, s), n, numel)


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(2, 9),
    numel=st.integers(0, 200),
    op=st.sampled_from(Op),
    dtype=st.sampled_from(("f4", "f8", "i4")),
    segment_bytes=st.integers(30, 500),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_shape(
    conform: Callable[..., Any], n: int, numel: int, op: Op, dtype: str, segment_bytes: int, in_place: bool, seed: int
) -> None:
    size = int(dtype[1])
    s = Settings(segment_bytes=segment_bytes)
    options = {"op": op, "dtype": dtype, "seed": seed}
    conform("all_reduce", lambda r: ring.all_reduce(r, n, numel, size, 1, s), n, numel, **options)
    numel //= n
    options["in_place"] = in_place
    conform("reduce_scatter", lambda r: ring.reduce_scatter(r, n, numel, size, 1, s), n, numel, **options)
    conform("all_gather", lambda r: ring.all_gather(r, n, numel, size, s), n, numel, **options)


def test_results_do_not_depend_on_timing(outcomes: Callable[..., Any]) -> None:
    assert outcomes(lambda r: ring.all_reduce(r, 5, 100, 4, 1, Settings(segment_bytes=40)), 5, 100) == 1


def test_everything_goes_to_the_next_rank_in_two_segments_or_more() -> None:
    n, length = 4, 1 << 20
    steps = ring.all_reduce(3, n, length, 1, 1, Settings(segment_bytes=length)).steps
    sends = steps[steps["kind"] == StepKind.SEND]
    assert set(sends["peer"]) == {0}
    assert sends["length"].sum() == 2 * (n - 1) * length // n
    assert len(sends) == 2 * (n - 1) * 2


def test_reduce_scatter_needs_two_chunks_of_scratch_at_most() -> None:
    assert ring.reduce_scatter(0, 2, 1000, 4, 1, Settings()).scratch_bytes == 0
    assert ring.reduce_scatter(0, 9, 1000, 4, 1, Settings()).scratch_bytes <= 2 * 4032
