from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.plans import host
from commlayer.plans.plan import StepKind
from commlayer.plans.settings import Settings
from commlayer.transport.base import Op

SIZES = (0, 1, 2, 7, 61, 128, 251)
WORLDS = (2, 3, 4, 9)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("n", WORLDS)
def test_table(conform: Callable[..., Any], n: int, numel: int) -> None:
    s = Settings(staging_bytes=2048, small_bytes=0)
    conform("all_reduce", lambda r: host.all_reduce(r, n, numel, 8, n, s), n, numel, average=True)
    conform("reduce_scatter", lambda r: host.reduce_scatter(r, n, numel, 8, n, s), n, numel, average=True)
    conform("all_gather", lambda r: host.all_gather(r, n, numel, 8, s), n, numel)
    conform("broadcast", lambda r: host.broadcast(r, n, numel, 8, n - 1, s), n, numel, root=n - 1)
    conform("reduce", lambda r: host.reduce(r, n, numel, 8, n, 1, s), n, numel, root=1, average=True)
    small = Settings(staging_bytes=4096)
    conform("all_reduce", lambda r: host.all_reduce(r, n, numel, 8, n, small), n, numel, average=True)


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(2, 9),
    numel=st.integers(0, 400),
    op=st.sampled_from(Op),
    dtype=st.sampled_from(("f4", "f8", "i4")),
    staging_bytes=st.sampled_from((256, 500, 1100, 3000)),
    small_bytes=st.sampled_from((0, 200)),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_shape(
    conform: Callable[..., Any],
    n: int,
    numel: int,
    op: Op,
    dtype: str,
    staging_bytes: int,
    small_bytes: int,
    in_place: bool,
    seed: int,
) -> None:
    size = int(dtype[1])
    s = Settings(staging_bytes=staging_bytes, small_bytes=small_bytes)
    root = seed % n
    options = {"op": op, "dtype": dtype, "seed": seed}
    conform("all_reduce", lambda r: host.all_reduce(r, n, numel, size, 1, s), n, numel, **options)
    conform("broadcast", lambda r: host.broadcast(r, n, numel, size, root, s), n, numel, root=root, **options)
    conform("reduce", lambda r: host.reduce(r, n, numel, size, 1, root, s), n, numel, root=root, **options)
    numel //= n
    options["in_place"] = in_place
    conform("reduce_scatter", lambda r: host.reduce_scatter(r, n, numel, size, 1, s), n, numel, **options)
    conform("all_gather", lambda r: host.all_gather(r, n, numel, size, s), n, numel, **options)


@pytest.mark.parametrize("n", WORLDS)
def test_barrier(barrier_holds: Callable[..., Any], n: int) -> None:
    barrier_holds(lambda r: host.barrier(r, n), n)


@pytest.mark.parametrize("small_bytes", [0, 4096])
def test_results_do_not_depend_on_timing(outcomes: Callable[..., Any], small_bytes: int) -> None:
    s = Settings(staging_bytes=1024, small_bytes=small_bytes)
    assert outcomes(lambda r: host.all_reduce(r, 5, 200, 4, 1, s), 5, 200) == 1


@pytest.mark.parametrize(
    ("collective", "arguments"),
    [("all_reduce", [1]), ("reduce_scatter", [1]), ("all_gather", []), ("reduce", [1, 0])],
)
def test_one_slot_would_not_do(
    conform: Callable[..., Any], collective: str, arguments: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interleavings tried here are rough enough to find a slot that is used again too early."""
    monkeypatch.setattr(host, "SLOTS", 1)
    make = getattr(host, collective)
    s = Settings(staging_bytes=512, small_bytes=0)

    def run() -> None:
        for seed in range(20):
            conform(collective, lambda r: make(r, 3, 500, 8, *arguments, s), 3, 500, seed=seed)

    with pytest.raises(AssertionError, match=r"(?i)not equal"):
        run()


@pytest.mark.parametrize("staging_bytes", [600, 5000])
def test_plans_fit_the_staging_they_were_given(staging_bytes: int) -> None:
    s = Settings(staging_bytes=staging_bytes, small_bytes=0)
    for plan in (
        host.all_reduce(1, 4, 9999, 2, 1, s),
        host.reduce_scatter(1, 4, 9999, 2, 1, s),
        host.all_gather(1, 4, 9999, 2, s),
        host.broadcast(1, 4, 9999, 2, 0, s),
        host.reduce(1, 4, 9999, 2, 1, 0, s),
    ):
        assert 0 < plan.staging_bytes <= staging_bytes


def test_no_network_is_used() -> None:
    kinds = set(host.all_reduce(0, 3, 1 << 20, 4, 3, Settings()).steps["kind"])
    assert kinds == {StepKind.COPY, StepKind.REDUCE, StepKind.SCALE, StepKind.POST, StepKind.AWAIT}


def test_staging_that_cannot_hold_an_element_each_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise the staging size"):
        host.reduce_scatter(0, 9, 100, 8, 1, Settings(staging_bytes=128))
