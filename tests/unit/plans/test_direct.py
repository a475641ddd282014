from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.plans import direct
from commlayer.plans.plan import StepKind
from commlayer.plans.settings import Settings
from commlayer.transport.base import Op

SIZES = (0, 1, 2, 7, 61, 128, 251)
WORLDS = (2, 3, 4, 9)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("n", WORLDS)
def test_table(conform: Callable[..., Any], n: int, numel: int) -> None:
    tiny = Settings(segment_bytes=300)
    ordered = Settings(segment_bytes=300, deterministic=True)
    for s in (tiny, ordered):
        conform("all_reduce", lambda r, s=s: direct.all_reduce(r, n, numel, 8, 1, s), n, numel)
        conform("reduce_scatter", lambda r, s=s: direct.reduce_scatter(r, n, numel, 8, n, s), n, numel, average=True)
        conform("reduce", lambda r, s=s: direct.reduce(r, n, numel, 8, n, 1, s), n, numel, root=1, average=True)
    conform("all_reduce", lambda r: direct.exchange(r, n, numel, 8, n), n, numel, average=True)
    conform("all_gather", lambda r: direct.all_gather(r, n, numel, 8, tiny), n, numel)
    conform("broadcast", lambda r: direct.broadcast(r, n, numel, 8, n - 1, tiny), n, numel, root=n - 1)


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(2, 9),
    numel=st.integers(0, 300),
    op=st.sampled_from(Op),
    dtype=st.sampled_from(("f4", "f8", "i4")),
    segment_bytes=st.integers(1, 900),
    deterministic=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_shape(
    conform: Callable[..., Any],
    n: int,
    numel: int,
    op: Op,
    dtype: str,
    segment_bytes: int,
    deterministic: bool,
    in_place: bool,
    seed: int,
) -> None:
    numel = min(numel, segment_bytes)  # many segments, but not hundreds
    size = int(dtype[1])
    s = Settings(segment_bytes=segment_bytes, deterministic=deterministic)
    root = seed % n
    options = {"op": op, "dtype": dtype, "seed": seed}
    conform("all_reduce", lambda r: direct.all_reduce(r, n, numel, size, 1, s), n, numel, **options)
    conform("all_reduce", lambda r: direct.exchange(r, n, numel, size, 1), n, numel, **options)
    conform("reduce", lambda r: direct.reduce(r, n, numel, size, 1, root, s), n, numel, root=root, **options)
    options["in_place"] = in_place
    conform("reduce_scatter", lambda r: direct.reduce_scatter(r, n, numel // n, size, 1, s), n, numel // n, **options)
    conform("all_gather", lambda r: direct.all_gather(r, n, numel // n, size, s), n, numel // n, **options)
    conform("broadcast", lambda r: direct.broadcast(r, n, numel, size, root, s), n, numel, root=root, **options)


@pytest.mark.parametrize("n", WORLDS)
def test_barrier(barrier_holds: Callable[..., Any], n: int) -> None:
    barrier_holds(lambda r: direct.barrier(r, n), n)


def test_deterministic_results_do_not_depend_on_timing(outcomes: Callable[..., Any]) -> None:
    s = Settings(segment_bytes=300)
    assert outcomes(lambda r: direct.all_reduce(r, 5, 100, 4, 1, s), 5, 100) > 1
    s = Settings(segment_bytes=300, deterministic=True)
    assert outcomes(lambda r: direct.all_reduce(r, 5, 100, 4, 1, s), 5, 100) == 1
    assert outcomes(lambda r: direct.exchange(r, 5, 100, 4, 1), 5, 100) == 1
    s = Settings(segment_bytes=1 << 20, deterministic=True)
    assert outcomes(lambda r: direct.reduce(r, 5, 5000, 4, 1, 0, s), 5, 5000) == 1


@pytest.mark.parametrize("n", WORLDS)
def test_long_broadcasts_are_scattered(conform: Callable[..., Any], n: int) -> None:
    """The root sends about one copy of the data altogether, not one for each peer."""
    numel = 5000
    s = Settings(segment_bytes=20_000)
    conform("broadcast", lambda r: direct.broadcast(r, n, numel, 8, 1, s), n, numel, root=1)
    steps = direct.broadcast(1, n, numel, 8, 1, s).steps
    assert steps["length"][steps["kind"] == StepKind.SEND].sum() == numel * 8


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("n", WORLDS)
def test_long_reductions_are_shared(
    conform: Callable[..., Any], n: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root receives about one copy of the data altogether, not one from each peer."""
    monkeypatch.setattr(direct, "ORDERED_SEGMENTS", 2)
    numel = 9000
    s = Settings(segment_bytes=20_000, deterministic=deterministic)
    for seed in range(3):
        conform("reduce", lambda r: direct.reduce(r, n, numel, 8, 1, 1, s), n, numel, root=1, seed=seed)
    steps = direct.reduce(1, n, numel, 8, 1, 1, s).steps
    kinds = (StepKind.RECV_COPY, StepKind.RECV_REDUCE)
    assert sum(step["length"] for step in steps if step["kind"] in kinds) == numel * 8


def test_all_reduce_sends_the_least_possible() -> None:
    n, length = 4, 1 << 20
    steps = direct.all_reduce(0, n, length, 1, 1, Settings()).steps
    assert steps["length"][steps["kind"] == StepKind.SEND].sum() == 2 * (n - 1) * length // n


def test_no_segment_waits_for_another() -> None:
    """Whatever a contribution needs is there from the start: the gather half cannot hold back the reduce half."""
    s = Settings(segment_bytes=1 << 10)
    steps = direct.all_reduce(1, 4, 1 << 14, 1, 1, s).steps
    sends = steps[steps["kind"] == StepKind.SEND]
    assert (sends["dependencies"] == 0).sum() == 3 * 16
    assert (steps[steps["kind"] == StepKind.RECV_REDUCE]["dependencies"] == 0).all()
