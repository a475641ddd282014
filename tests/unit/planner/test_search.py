"""The search against a simulation of every choice, its order, its reasons and its errors."""

import dataclasses
import functools
import math
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.planner import Cluster, Costs, Layer, Limits, Link, Links, Plans, Rank, partition, search
from commlayer.planner.plan import Choice
from commlayer.planner.search import STEPS, bound, unbeaten
from commlayer.scheduler.actions import Mode, Reduction
from commlayer.scheduler.link import Discipline, Network
from commlayer.scheduler.pipelines import breadth_first, interleaved, one_f_one_b
from commlayer.scheduler.simulate import StageCosts, simulate

GIB = 1 << 30
LAYERS = st.lists(
    st.builds(Layer, st.integers(1, 5), st.integers(1, 9), st.integers(0, 40), st.integers(1, 9)),
    min_size=2,
    max_size=6,
)


def transformer(layers: int = 16, rate_bps: float = 5e9, activation_bytes: float = GIB / 16) -> Costs:
    layer = Layer(0.01, 0.02, parameter_bytes=GIB / 16, activation_bytes=activation_bytes, output_bytes=GIB / 256)
    return Costs([layer] * layers, Link(rate_bps, latency_s=1e-4))


def plans_of(costs: Costs, memory_bytes: float = 24 * GIB, keep: int = 10, staleness: tuple[int, ...] = (0,)) -> Plans:
    return search(
        costs,
        ranks=4,
        microbatches=8,
        memory_bytes=memory_bytes,
        keep=keep,
        staleness=staleness,
        chunks=(1, 2),
        buckets=(1, 4),
    )


@pytest.fixture(scope="module")
def plans() -> Plans:
    return plans_of(transformer(), keep=8)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.builds(
            Layer,
            st.integers(1, 5),
            st.integers(1, 9),
            st.integers(0, 40),
            st.integers(1, 9),
            update_s=st.integers(0, 3),
        ),
        min_size=4,
        max_size=6,
    ),
    st.integers(1, 6),
    st.sampled_from([8.0, 40.0]),
    st.sampled_from(["class", "fifo"]),
)
def test_the_plans_kept_are_the_best_of_all(
    layers: list[Layer], keep: int, rate_bps: float, discipline: Discipline
) -> None:
    costs = Costs(layers, Link(rate_bps, latency_s=0.125), action_s=0.0625)
    memory_bytes = 600  # some plans need more, and the smallest one of any layers less
    few, every = (
        search(
            costs,
            ranks=2,
            microbatches=4,
            memory_bytes=memory_bytes,
            staleness=(0, 1),
            chunks=(1, 2),
            buckets=(1, 2),
            discipline=discipline,
            keep=count,
        )
        for count in (keep, 10_000)
    )
    assert [plan.step_s for plan in few] == pytest.approx([plan.step_s for plan in every[:keep]])
    for plan in every:
        assert plan.step_s == pytest.approx(
            plan.choice.simulate(costs, discipline, steps=STEPS[plan.choice.reduction.mode]).step_s
        )
        assert plan.step_s >= bound(costs, plan.choice) - 1e-9
        assert plan.memory_bytes == plan.choice.memory_bytes(costs) <= memory_bytes


MODES: tuple[Mode, ...] = ("step", "deferred")


def fastest_of_all(layers: list[Layer], link: Link, ranks: int, microbatches: int) -> float:
    """The least step of 1F1B, AIAO and every interleaved group, simulated without the planner's choices or bounds."""
    costs, best = Costs(layers, link), math.inf
    for depth, chunks in product((rank for rank in range(1, ranks + 1) if ranks % rank == 0), (1, 2)):
        replicas, count = ranks // depth, microbatches * depth // ranks
        if microbatches % replicas or depth * chunks > len(layers):
            continue
        orders = [one_f_one_b(depth, count)] if chunks == 1 else [breadth_first(depth, count, chunks)]
        if chunks > 1:
            orders += [
                interleaved(depth, count, chunks, g) for g in (1, 2, 4) if depth <= g <= count and count % g == 0
            ]
        for shares, mode, buckets in product(
            ([1.0] * depth * chunks, [0.5] * depth + [1.0] * depth * (chunks - 1)), MODES, (1, 2)
        ):
            if shares[0] < 1 and (chunks == 1 or mode == "step"):
                continue
            ranges = partition(costs, depth * chunks, Limits(shares=shares), overlap=True).stages
            stages = [costs.stage(first, end, replicas=replicas) for first, end in ranges]
            for order in orders:
                result = simulate(
                    order, stages, Reduction(mode, buckets), Network("class", link.latency_s), steps=STEPS[mode]
                )
                best = min(best, result.step_s)
    return best


@settings(max_examples=20, deadline=None)
@given(
    LAYERS,
    st.sampled_from([8.0, 40.0, 400.0]),
    st.sampled_from([(1, 3), (2, 4), (4, 4)]),
)
@example(  # a smaller first segment is faster without a reduction, too
    [Layer(1, 1, 0, 1), Layer(1, 1, 12, 1), Layer(1, 1, 0, 1), Layer(1, 2, 0, 1), Layer(1, 2, 0, 1)], 8.0, (2, 4)
)
def test_the_best_plan_is_the_fastest_of_all(layers: list[Layer], rate_bps: float, job: tuple[int, int]) -> None:
    link = Link(rate_bps, latency_s=0.125)
    best = search(
        Costs(layers, link), ranks=job[0], microbatches=job[1], memory_bytes=1e9, chunks=(1, 2), buckets=(1, 2), keep=1
    )
    assert best[0].step_s == pytest.approx(fastest_of_all(layers, link, *job))


def fastest_on(cluster: Cluster, layers: list[Layer], microbatches: int) -> float:
    """The least step of 1F1B and AIAO in both placements, without the planner's places, choices or bounds."""
    size, host_of, links = len(cluster.ranks), cluster.host_of, cluster.links
    costs, best = Costs(layers, links.within), math.inf
    for depth, chunks, by_stage in product((d for d in range(1, size + 1) if size % d == 0), (1, 2), (True, False)):
        replicas = size // depth
        if microbatches % replicas or depth * chunks > len(layers):
            continue
        pipelines = [
            [stage * replicas + replica if by_stage else replica * depth + stage for stage in range(depth)]
            for replica in range(replicas)
        ]
        speeds, sends, reduces, latencies, leaves = [], [], [], [], []
        for at in range(depth):
            members = [ranks[at] for ranks in pipelines]
            speeds.append(min(cluster.ranks[rank].speed_flops for rank in members) / cluster.ranks[0].speed_flops)
            rates = [links.within.rate_bps] if at == depth - 1 and chunks == 1 else []
            hops = [(host_of[ranks[at]], host_of[ranks[(at + 1) % depth]]) for ranks in pipelines if not rates]
            for one, other in hops:
                sharing = max(sum(h == one != k for h, k in hops), sum(k == other != h for h, k in hops))
                rates.append(links.within.rate_bps if one == other else links.between.rate_bps / sharing)
                if at < depth * chunks - 1:
                    latencies.append((links.within if one == other else links.between).latency_s)
            sends.append(Link(min(rates)))
            own = {
                host: sum(host_of[rank] == host for rank in members) for host in set(map(host_of.__getitem__, members))
            }
            crossed = max(1 - count / replicas for count in own.values())
            inside = max(
                (replicas - 1) / replicas - (1 / count - 1 / replicas) if count > 1 else 0 for count in own.values()
            )
            reduces.append(2 * (links.between.send_s(crossed) + links.within.send_s(inside)))
            leaves.append(crossed > 0)
            if replicas > 1:
                latencies.append(
                    links.between.latency_s * (crossed > 0) + links.within.latency_s * (max(own.values()) > 1)
                )
        shares = [[1.0] * depth * chunks, [0.5] * depth + [1.0] * depth * (chunks - 1)]
        for share, mode, buckets in product(shares, MODES, (1, 2)):
            if share[0] < 1 and (chunks == 1 or mode == "step"):
                continue
            limits = Limits(shares=share, speeds=speeds * chunks, links=(sends * chunks)[: depth * chunks - 1])
            ranges = partition(costs, depth * chunks, limits, overlap=True).stages
            stages = [
                StageCosts(
                    sum(layer.forward_s for layer in layers[first:end]) / speeds[stage % depth],
                    sum(layer.backward_s for layer in layers[first:end]) / speeds[stage % depth],
                    send_s=sends[stage % depth].send_s(layers[end - 1].sent_bytes),
                    reduce_s=reduces[stage % depth] * sum(layer.parameter_bytes for layer in layers[first:end]),
                )
                for stage, (first, end) in enumerate(ranges)
            ]
            count = microbatches // replicas
            order = one_f_one_b(depth, count) if chunks == 1 else breadth_first(depth, count, chunks)
            hosts = tuple(host_of[rank] for rank in pipelines[0])
            network = Network("class", max(latencies, default=0.0), hosts=hosts, leaves_host=tuple(leaves))
            reduction = Reduction(mode, buckets) if replicas > 1 else Reduction()
            best = min(best, simulate(order, stages, reduction, network, steps=STEPS[mode]).step_s)
    return best


@settings(max_examples=40, deadline=None)
@given(
    LAYERS,
    st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 1), (4,)]),
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=4, max_size=4),
    st.sampled_from([8.0, 40.0, 400.0]),
    st.sampled_from([1, 10]),
)
@example([Layer(1, 1, 0, 3), Layer(1, 1, 15, 1)], (2, 2), [1.0] * 4, 8.0, 1)  # reductions do not take the hosts' links
def test_the_best_plan_on_a_cluster_is_the_fastest_of_all(
    layers: list[Layer], hosts: tuple[int, ...], speeds: list[float], rate_bps: float, ratio: int
) -> None:
    links = Links(Link(rate_bps * ratio, 0.0625), Link(rate_bps, 0.125))
    own = iter(speeds)
    cluster = Cluster([[Rank(next(own), 1e9) for _ in range(count)] for count in hosts], links)
    count = len(cluster.ranks)
    best = search(
        Costs(layers, links.within), ranks=cluster, microbatches=2 * count, chunks=(1, 2), buckets=(1, 2), keep=10_000
    )
    among = [plan.step_s for plan in best if plan.choice.chunks == 1 or plan.choice.group is None]
    assert min(among) == pytest.approx(fastest_on(cluster, layers, 2 * count))
    for plan in best:
        assert plan.step_s >= bound(Costs(layers, links.within), plan.choice) - 1e-9


def test_hosts_of_one_like_rank_are_no_cluster() -> None:
    costs = transformer()
    like = Cluster([[Rank(1e12, 24 * GIB)]] * 4, Links(Link(1e15), costs.link))
    found = functools.partial(search, costs, microbatches=8, chunks=(1, 2), buckets=(1, 4), keep=20)
    ours, theirs = found(ranks=like), found(ranks=4, memory_bytes=24 * GIB)
    assert [plan.step_s for plan in ours] == pytest.approx([plan.step_s for plan in theirs])
    assert [plan.link_bytes for plan in ours] == pytest.approx([plan.link_bytes for plan in theirs])
    assert [plan.memory_bytes for plan in ours] == [plan.memory_bytes for plan in theirs]


def test_faster_ranks_have_more_layers_and_neighbours_share_a_host() -> None:
    """Ranks of two hosts, the second of which is three times as fast; reductions between them would take 4 s."""
    fast, slow = Rank(3e12, 24 * GIB), Rank(1e12, 24 * GIB)
    links = Links(Link(1e12), Link(5e9, 1e-4))
    best = search(transformer(), ranks=Cluster([[slow, slow], [fast, fast]], links), microbatches=8, chunks=(1,))[0]
    assert (best.choice.ranks, best.choice.replicas, best.choice.outer) == (2, 2, "stages")
    assert best.choice.cuts == (0, 4, 16)
    assert "neighbours are replicas" in str(best)


def test_each_rank_of_a_cluster_has_its_memory() -> None:
    small, large = Rank(1e12, 3 * GIB), Rank(1e12, 24 * GIB)
    costs = transformer()
    best = search(costs, ranks=Cluster([[small], [large]], Links(costs.link, costs.link)), microbatches=8, chunks=(1,))
    assert best
    for plan in best:
        assert plan.choice.places is not None
        for needed, place in zip(plan.choice.rank_bytes(costs), plan.choice.places, strict=True):
            assert needed <= place.memory_bytes
    tiny = Cluster([[Rank(1e12, 1.0)]] * 2, Links(costs.link, costs.link))
    with pytest.raises(ConfigError, match=r"the smallest needs .* times as much on some rank"):
        search(costs, ranks=tiny, microbatches=8)


def test_the_memory_is_given_once() -> None:
    costs = transformer()
    with pytest.raises(ConfigError, match="memory_bytes=None with ranks=4; give the bytes of one rank"):
        search(costs, ranks=4, microbatches=8)
    cluster = Cluster([[Rank(1e12, GIB)]], Links(costs.link, costs.link))
    with pytest.raises(ConfigError, match=r"ranks=a Cluster; .*none with a Cluster"):
        search(costs, ranks=cluster, microbatches=8, memory_bytes=1e9)


def test_plans_come_in_the_order_of_their_steps(plans: Plans) -> None:
    assert len(plans) == 8
    assert [plan.step_s for plan in plans] == sorted(plan.step_s for plan in plans)
    assert len({plan.choice for plan in plans}) == 8


def test_every_plan_is_one_line_that_says_why_it_lost(plans: Plans) -> None:
    assert plans[0].reason == ""
    for plan in plans:
        assert "\n" not in str(plan)
        assert f"{plan.choice.ranks} rank" in str(plan)
        assert f"x {plan.choice.replicas} replica" in str(plan)
    for plan in plans[1:]:
        assert "the best" in plan.reason
        assert plan.reason in str(plan)
    assert plans.rejected
    assert all(
        " of 24.00 GiB" in plan.reason
        or "the best" in plan.reason
        or "at least" in plan.reason
        or "fewer than" in plan.reason
        for plan in plans.rejected
    )


def test_deferral_wins_on_a_slow_link(plans: Plans) -> None:
    """Data parallel: reductions of 2 * 3/4 * 1 GiB take 2.6 s at 5 Gbit/s; compute of a step takes 0.96 s."""
    assert plans[0].choice.ranks > 1
    modes = {plan.choice.reduction.mode for plan in plans_of(transformer(rate_bps=2e10))[:1]}
    assert modes == {"deferred"}


def test_a_fast_link_makes_data_parallel_best() -> None:
    """There is no bubble: 2 micro-batches of 16 * 30 ms on each rank, 0.96 s."""
    best = plans_of(transformer(rate_bps=1e14))[0]
    assert (best.choice.ranks, best.choice.replicas) == (1, 4)
    assert best.step_s == pytest.approx(0.96, rel=0.01)


def test_stale_plans_only_on_request() -> None:
    costs = transformer(rate_bps=2e10)
    stale = plans_of(costs, staleness=(0, 1))
    assert stale[0].choice.reduction.mode == "stale"
    assert stale[0].step_s < plans_of(costs)[0].step_s
    assert all(plan.choice.reduction.mode != "stale" for plan in plans_of(costs))


def test_little_memory_leads_to_recomputation() -> None:
    """A rank that keeps one micro-batch of 16 GiB does not fit 8 GiB; its outputs do."""
    costs = transformer(activation_bytes=GIB)
    best = plans_of(costs, memory_bytes=8 * GIB)[0]
    assert best.choice.recompute
    assert best.memory_bytes <= 8 * GIB
    assert not plans_of(costs, memory_bytes=200 * GIB)[0].choice.recompute


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(
            Layer, st.integers(1, 5), st.integers(1, 9), st.integers(0, 9), st.integers(4, 40), st.integers(1, 3)
        ),
        min_size=4,
        max_size=6,
    ),
    st.integers(60, 400),
    st.sampled_from([1, 2]),
)
def test_only_the_ranks_recompute_that_need_it(layers: list[Layer], memory_bytes: int, chunks: int) -> None:
    """No set of ranks that recompute makes the balanced partition faster than the best plan, on quick links."""
    costs = Costs(layers, Link(1e15))
    cuts = partition(costs, 2 * chunks, overlap=True).cuts
    orders: list[int | None] = [None] if chunks == 1 else [None, 2, 4]
    steps = []
    for group, ranks in product(orders, ((), (0,), (1,), (0, 1))):
        choice = Choice(2, 1, 4, chunks, group, Reduction(), ranks, cuts)
        if choice.memory_bytes(costs) <= memory_bytes:
            steps.append(choice.simulate(costs, steps=6).step_s)
    try:
        found = search(
            costs, ranks=2, microbatches=4, memory_bytes=memory_bytes, chunks=(chunks,), buckets=(1,), keep=99
        )
    except ConfigError:
        assert not steps
        return
    pipelines = [plan for plan in found if plan.choice.ranks == 2]
    assert all(plan.memory_bytes <= memory_bytes for plan in found)
    if steps:
        assert pipelines[0].step_s <= min(steps) * (1 + 1e-9)
    for plan in pipelines:
        for rank in plan.choice.recompute:
            fewer = dataclasses.replace(plan.choice, recompute=tuple(r for r in plan.choice.recompute if r != rank))
            assert fewer.memory_bytes(costs) > memory_bytes


def test_the_first_stage_recomputes_which_keeps_most() -> None:
    """1F1B on two ranks: rank 0 keeps two micro-batches of 20 bytes, rank 1 one."""
    layer = Layer(1, 2, 0, 10, output_bytes=1)
    plans = search(Costs([layer] * 4, Link(1e15)), ranks=2, microbatches=8, memory_bytes=25, chunks=(1,))
    best = next(plan for plan in plans if plan.choice.ranks == 2)
    assert (best.choice.cuts, best.choice.recompute) == ((0, 2, 4), (0,))
    assert "recompute on ranks 0," in str(best)


def test_with_chunks_the_rank_recomputes_that_keeps_most() -> None:
    """Groups of 2 on two ranks of two chunks: rank 0 keeps 5 activations of 10 bytes, rank 1 keeps 3."""
    layer = Layer(1, 2, 0, 10, output_bytes=1)
    plans = search(Costs([layer] * 4, Link(1e15)), ranks=2, microbatches=4, memory_bytes=40, chunks=(2,), keep=99)
    recomputed = {plan.choice.recompute for plan in plans if (plan.choice.ranks, plan.choice.group) == (2, 2)}
    assert recomputed == {(0,)}


def test_1f1b_gets_a_partition_that_fits() -> None:
    """Two ranks, 4 layers: rank 0 keeps two micro-batches, so it takes one layer where memory is short."""
    costs = Costs([Layer(1, 2, 0, 10)] * 4, Link(1e12))
    best = search(costs, ranks=2, microbatches=1, memory_bytes=30, chunks=(1,))[0]
    assert best.memory_bytes <= 30
    tight = search(costs, ranks=2, microbatches=3, memory_bytes=35, chunks=(1,))
    assert any(plan.choice.cuts == (0, 1, 4) for plan in tight)


def test_frontier_of_plans(plans: Plans) -> None:
    frontier = plans.frontier()
    assert frontier[0].step_s == plans[0].step_s
    for plan in plans:
        assert any(
            kept.step_s <= plan.step_s and kept.memory_bytes <= plan.memory_bytes and kept.link_bytes <= plan.link_bytes
            for kept in frontier
        )


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=30))
def test_what_nothing_beats_is_kept_once(costs: list[tuple[int, int, int]]) -> None:
    def is_beaten(own: tuple[int, ...]) -> bool:
        return any(own != other and all(b <= a for a, b in zip(own, other, strict=True)) for other in costs)

    kept = unbeaten(costs)
    assert [costs[i] for i in kept] == sorted({own for own in costs if not is_beaten(own)})
    assert all(costs.index(costs[i]) == i for i in kept)


def test_a_plan_simulates_again(plans: Plans) -> None:
    assert plans[0].simulate().step_s == pytest.approx(plans[0].step_s, rel=0.01)


def test_bad_input_is_named() -> None:
    costs = transformer()
    with pytest.raises(ConfigError, match=r"memory_bytes=1000 is too small for any plan: the smallest needs \d+ bytes"):
        search(costs, ranks=2, microbatches=2, memory_bytes=1000)
    with pytest.raises(ConfigError, match="ranks=3 and microbatches=1 cannot be divided"):
        search(transformer(layers=2), ranks=3, microbatches=1, memory_bytes=GIB)
    with pytest.raises(ConfigError, match="ranks=0 is not valid; give a whole number"):
        search(costs, ranks=0, microbatches=2, memory_bytes=GIB)
    with pytest.raises(ConfigError, match=r"microbatches=2\.5 is not valid"):
        search(costs, ranks=2, microbatches=2.5, memory_bytes=GIB)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"chunks\[1\]=0 is not valid"):
        search(costs, ranks=2, microbatches=2, memory_bytes=GIB, chunks=(1, 0))
    with pytest.raises(ConfigError, match="memory_bytes=-1 is not above 0"):
        search(costs, ranks=2, microbatches=2, memory_bytes=-1)
    with pytest.raises(ConfigError, match=r"staleness=\(2,\) is unknown"):
        search(costs, ranks=2, microbatches=2, memory_bytes=GIB, staleness=(2,))


def test_a_small_first_segment_that_is_no_smaller_hides_no_choice() -> None:
    """With a layer per stage, both sizes of the first segment give the same partition: one choice, with every mode."""
    found = search(transformer(4), ranks=2, microbatches=4, memory_bytes=math.inf, chunks=(2,), keep=100)
    assert {(p.choice.ranks, p.choice.group) for p in found} >= {(2, None), (2, 2), (2, 4)}
    replicated = search(transformer(4), ranks=4, microbatches=8, memory_bytes=math.inf, chunks=(2,), keep=100)
    modes = {p.choice.reduction.mode for p in replicated if p.choice.ranks == 2}
    assert modes == {"step", "deferred"}
