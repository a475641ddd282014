from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.plans import direct, hierarchical
from commlayer.plans.hierarchical import Hosts
from commlayer.plans.plan import StepKind
from commlayer.plans.settings import Settings
from commlayer.transport.base import Op

HOSTS = (
    ((0, 1), (2,)),
    ((0, 2), (1, 3)),
    ((0, 1, 2), (3,)),
    ((0,), (1, 2), (3,)),
    ((0, 1, 2), (3, 4, 5), (6, 7)),
    ((0, 8), (1, 7), (2, 6), (3, 4, 5)),
)


@st.composite
def partitions(draw: st.DrawFn) -> Hosts:
    """Ranks 0..n-1 dealt to at least two hosts, some of them to share one."""
    n = draw(st.integers(3, 9))
    count = draw(st.integers(2, n - 1))
    places = draw(
        st.permutations(
            [*range(count), *draw(st.lists(st.integers(0, count - 1), min_size=n - count, max_size=n - count))]
        )
    )
    return tuple(sorted(tuple(rank for rank in range(n) if places[rank] == host) for host in range(count)))


def check_all(
    conform: Callable[..., Any],
    hosts: Hosts,
    numel: int,
    s: Settings,
    *,
    average: bool = False,
    in_place: bool = False,
    op: Op = Op.SUM,
    dtype: str = "f8",
    seed: int = 0,
) -> None:
    n, size = sum(map(len, hosts)), int(dtype[1])
    divisor, root = n if average else 1, seed % n
    o: dict[str, Any] = {"op": op, "dtype": dtype, "seed": seed}
    reduces = {**o, "average": average}
    conform("all_reduce", lambda r: hierarchical.all_reduce(r, hosts, numel, size, divisor, s), n, numel, **reduces)
    conform("broadcast", lambda r: hierarchical.broadcast(r, hosts, numel, size, root, s), n, numel, root=root, **o)
    reduces["root"] = root
    conform("reduce", lambda r: hierarchical.reduce(r, hosts, numel, size, divisor, root, s), n, numel, **reduces)
    del reduces["root"]
    numel //= n
    reduces["in_place"] = o["in_place"] = in_place
    conform(
        "reduce_scatter", lambda r: hierarchical.reduce_scatter(r, hosts, numel, size, divisor, s), n, numel, **reduces
    )
    conform("all_gather", lambda r: hierarchical.all_gather(r, hosts, numel, size, s), n, numel, **o)


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 61, 331, 1009])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_table(conform: Callable[..., Any], hosts: Hosts, numel: int) -> None:
    s = Settings(segment_bytes=400, staging_bytes=4096, exchange_limit_bytes=0)
    check_all(conform, hosts, numel, s, average=True, seed=numel)


@pytest.mark.parametrize("deterministic", [False, True])
def test_slots_are_used_again_in_time(
    conform: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """With one slot of each kind a segment that comes too early would soon overwrite the one before it."""
    monkeypatch.setattr(hierarchical, "NETWORK_LAG", 1)
    monkeypatch.setattr(direct, "ORDERED_SEGMENTS", 1)
    s = Settings(segment_bytes=200, staging_bytes=2048, deterministic=deterministic, exchange_limit_bytes=0)
    for seed in range(8):
        check_all(conform, ((0, 1), (2,), (3, 4)), 500, s, seed=seed)


@settings(max_examples=80, deadline=None)
@given(
    hosts=partitions(),
    numel=st.integers(0, 500),
    op=st.sampled_from(Op),
    dtype=st.sampled_from(("f4", "f8", "i4")),
    segment_bytes=st.integers(100, 900),
    staging_bytes=st.sampled_from((512, 1000, 4096)),
    exchange_limit_bytes=st.sampled_from((0, 1 << 20)),
    deterministic=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_shape(
    conform: Callable[..., Any],
    hosts: Hosts,
    numel: int,
    op: Op,
    dtype: str,
    in_place: bool,
    seed: int,
    **choices: Any,
) -> None:
    check_all(conform, hosts, numel, Settings(**choices), op=op, dtype=dtype, in_place=in_place, seed=seed)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_barrier(barrier_holds: Callable[..., None], hosts: Hosts) -> None:
    barrier_holds(lambda r: hierarchical.barrier(r, hosts), sum(map(len, hosts)))


def test_deterministic_results_do_not_depend_on_timing(outcomes: Callable[..., int]) -> None:
    hosts = ((0, 1), (2, 3), (4, 5))
    s = Settings(segment_bytes=300)
    assert outcomes(lambda r: hierarchical.all_reduce(r, hosts, 200, 4, 1, s), 6, 200) > 1
    s = Settings(segment_bytes=300, deterministic=True)
    assert outcomes(lambda r: hierarchical.all_reduce(r, hosts, 200, 4, 1, s), 6, 200) == 1


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
def test_data_crosses_the_network_once_per_host(collective: str) -> None:
    """Two hosts of four: each sends half of an all-reduce twice; one sends a broadcast, the other a reduction once."""
    hosts = ((0, 1, 2, 3), (4, 5, 6, 7))
    length = 1 << 20
    sent = 0
    for rank in hosts[0]:
        arguments = [1, 5] if collective == "reduce" else [1]
        steps = getattr(hierarchical, collective)(rank, hosts, length, 1, *arguments, Settings()).steps
        sends = steps[steps["kind"] == StepKind.SEND]
        assert set(sends["peer"]) <= {rank + 4, *hosts[1]}
        sent += int(sends["length"].sum())
    assert sent == length
