import functools
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.plans import cache, direct, select
from commlayer.plans.hierarchical import Hosts
from commlayer.plans.plan import Buffer, Plan, StepKind
from commlayer.plans.select import Collective, Settings, plan_for
from commlayer.transport.base import Op
from tests.unit.plans import interpreter
from tests.unit.plans.conformance import barrier_holds, conform, data, weights

ONE_HOST = ((0, 1, 2, 3),)
FLAT = ((0,), (1,), (2,), (3,))
MIXED = ((0, 1), (2, 3))


def equal(a: Plan, b: Plan) -> bool:
    return np.array_equal(a.steps, b.steps) and np.array_equal(a.successors, b.successors)


@pytest.mark.parametrize(
    ("collective", "hosts", "average", "numel"),
    list(
        itertools.product(
            ("all_reduce", "reduce_scatter", "all_gather", "broadcast"),
            (((0,),), ((0, 1),), ((0,), (1,)), ONE_HOST, FLAT, MIXED, ((0, 2), (1,))),
            (False, True),
            (0, 1, 13, 5000),
        )
    ),
)
def test_every_choice_gives_a_correct_plan(collective: Collective, hosts: Hosts, average: bool, numel: int) -> None:
    n = sum(map(len, hosts))
    reduces = collective in ("all_reduce", "reduce_scatter")
    for algorithm in ("auto", "direct", "ring"):
        s = Settings(algorithm=algorithm, segment_bytes=4096, exchange_limit_bytes=1000, staging_bytes=16 << 10)

        def make(rank: int, s: Settings = s) -> Plan:
            return plan_for(
                collective, rank=rank, hosts=hosts, numel=numel, itemsize=8, average=average, root=n - 1, settings=s
            )

        conform(collective, make, n, numel, average=average and reduces, root=n - 1, in_place=n > 1)


@pytest.mark.parametrize("hosts", [ONE_HOST, FLAT, MIXED], ids=str)
def test_barrier(hosts: Hosts) -> None:
    def make(rank: int) -> Plan:
        return plan_for("barrier", rank=rank, hosts=hosts, numel=0, itemsize=1, settings=Settings())

    barrier_holds(make, 4)


def test_alone_there_is_nothing_to_do_but_copy() -> None:
    expected: dict[Collective, int] = {
        "all_reduce": 0,
        "reduce_scatter": 1,
        "all_gather": 1,
        "broadcast": 0,
        "barrier": 0,
    }
    for collective, steps in expected.items():
        plan = plan_for(collective, rank=0, hosts=((0,),), numel=9, itemsize=4, average=True, settings=Settings())
        assert plan.steps["kind"].tolist() == [StepKind.COPY] * steps


def test_small_all_reduces_take_one_network_step() -> None:
    def all_reduce(numel: int, **settings: Any) -> Plan:
        s = Settings(**settings)
        return plan_for("all_reduce", rank=1, hosts=FLAT, numel=numel, itemsize=4, settings=s)

    limit = Settings().exchange_limit_bytes // 3 // 4
    assert equal(all_reduce(limit), direct.exchange(1, 4, limit, 4, 1))
    assert equal(all_reduce(limit + 1), direct.all_reduce(1, 4, limit + 1, 4, 1, Settings()))
    assert equal(all_reduce(limit, algorithm="direct"), direct.all_reduce(1, 4, limit, 4, 1, Settings()))


@pytest.mark.parametrize("hosts", [((0,), (1,)), ((0, 2), (1, 3))])
def test_two_hosts_take_one_network_step_up_to_256_kib(hosts: Any) -> None:
    """They send as many bytes in one step as in two."""

    def sends_results(numel: int, **settings: Any) -> bool:
        s = Settings(**settings)
        steps = plan_for("all_reduce", rank=0, hosts=hosts, numel=numel, itemsize=4, settings=s).steps
        sent = steps["length"][steps["kind"] == StepKind.SEND].sum()
        assert abs(int(sent) - numel * 4 // len(hosts[0])) <= 64 * len(steps)
        return bool(np.any((steps["kind"] == StepKind.RECV_COPY) & (steps["target"] == Buffer.OUTPUT)))

    limit = (256 << 10) // 4
    assert not sends_results(limit)
    assert not sends_results(limit, deterministic=True)
    assert sends_results(limit + 64)
    shares = [select.segment_count(hosts, numel * 4, Settings()) for numel in (limit, limit + 64)]
    assert shares == [0, 1]  # the hosts of the longer one own shards


@pytest.mark.parametrize(("n", "numel", "peers"), [(16, 1 << 20, 15), (17, 1 << 20, 1), (17, 1 << 14, 16)])
def test_large_worlds_use_the_ring_for_long_messages(n: int, numel: int, peers: int) -> None:
    hosts = tuple((rank,) for rank in range(n))
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        count = numel if collective == "all_reduce" else numel // n
        plan = plan_for(collective, rank=0, hosts=hosts, numel=count, itemsize=4, settings=Settings())
        assert len(set(plan.steps["peer"][plan.steps["kind"] == StepKind.SEND])) == peers


def test_plans_are_cached() -> None:
    def plan() -> Plan:
        return plan_for("all_reduce", rank=0, hosts=FLAT, numel=12345, itemsize=4, settings=Settings())

    assert plan() is plan()
    first = plan()
    select.PLANS.clear()
    assert len(select.PLANS) == 0
    assert plan() is not first


def test_plans_of_any_number_take_limited_memory() -> None:
    plans = cache.PlanCache(1 << 20)
    cached = plans.over(select.make_plan)
    hosts = tuple((rank,) for rank in range(100))
    for numel in range(100_000, 100_100):
        cached("all_reduce", rank=0, hosts=hosts, numel=numel, itemsize=4, settings=Settings())
    assert 0 < len(plans) < 60


@given(
    hosts=st.sampled_from(
        (ONE_HOST, FLAT, MIXED, ((0, 1, 2, 3, 4),), ((0, 3), (1,), (2, 4)), ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9)))
    ),
    numel=st.integers(1, 3000),
    dtype=st.sampled_from(("f4", "f8")),
    average=st.booleans(),
    fields=st.fixed_dictionaries(
        {
            "segment_bytes": st.sampled_from((300, 4096)),
            "staging_bytes": st.sampled_from((1024, 4096, 1 << 20)),
            "exchange_limit_bytes": st.sampled_from((0, 1 << 20)),
            "small_bytes": st.sampled_from((0, 1 << 20)),
        }
    ),
    shares=st.data(),
    seed=st.integers(0, 1 << 20),
)
def test_deterministic_sums_are_made_in_the_order_of_the_ranks_and_hosts(
    hosts: Hosts, numel: int, dtype: str, average: bool, fields: dict[str, Any], shares: st.DataObject, seed: int
) -> None:
    """So they depend on nothing else: neither on the length of a bucket nor on who owns a range."""
    world, itemsize = sum(map(len, hosts)), int(dtype[1])
    settings = Settings(deterministic=True, weights=shares.draw(weights(len(hosts))), **fields)
    replicas = data(world, numel, Op.SUM, dtype, seed)
    sums = [functools.reduce(np.add, (replicas[rank] for rank in host)) for host in hosts]
    expected = functools.reduce(np.add, sums)
    if average:
        expected = expected / np.dtype(dtype).type(world)
    plans = [
        plan_for(
            "all_reduce", rank=rank, hosts=hosts, numel=numel, itemsize=itemsize, average=average, settings=settings
        )
        for rank in range(world)
    ]
    interpreter.run(plans, replicas, replicas, Op.SUM, seed=seed)
    for replica in replicas:
        assert replica.tobytes() == expected.tobytes()


def test_weights_for_other_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights=\(1, 2\)\) for 4 hosts"):
        plan_for("all_reduce", rank=0, hosts=FLAT, numel=100_000, itemsize=4, settings=Settings(weights=(1, 2)))


def test_other_weights_are_another_signature() -> None:
    plans = [
        plan_for("all_reduce", rank=0, hosts=FLAT, numel=100_000, itemsize=4, settings=Settings(weights=weights))
        for weights in ((), (1, 1, 1, 0), (1, 1, 0, 1))
    ]
    assert len({plan.signature for plan in plans}) == 3
    assert [plan.weights for plan in plans] == [(), (1, 1, 1, 0), (1, 1, 0, 1)]
