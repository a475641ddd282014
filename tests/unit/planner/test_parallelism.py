"""The comparison against every layout and division of small instances, its order, its reasons and its errors."""

import dataclasses
import math
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.planner.cluster import Cluster, Links, Rank
from commlayer.planner.costs import Link
from commlayer.planner.exchange import Exchange
from commlayer.planner.layout import Layout
from commlayer.planner.mesh import Mesh
from commlayer.planner.parallelism import parallelism
from commlayer.planner.prediction import Prediction, predict
from commlayer.planner.transformer import Transformer
from commlayer.scheduler.pipelines import one_f_one_b
from commlayer.scheduler.simulate import StageCosts, simulate
from tests.unit.planner.test_spread import divisions

GIB = 1 << 30
MODEL = Transformer(layers=4, width=8, heads=4, length=4, sequences=8, launch_s=1e-9)
FAST = Links(Link(1e12, 1e-9), Link(1e10, 1e-8))


def every_layout(model: Transformer, ranks: int) -> Iterator[Layout]:
    """All layouts that can run the model, from all values of all fields."""
    sizes = range(1, ranks + 1)
    meshes = [Mesh()] + [Mesh("1-D", q) for q in sizes if q > 1] + [Mesh("2-D", q) for q in sizes if q > 1]
    meshes += [Mesh("3-D", 2)] + [Mesh("2.5-D", 2, depth) for depth in (2, 3, 4)]
    batches = [count for count in range(1, model.sequences + 1) if model.sequences % count == 0]
    for mesh, stages, replicas, sharded, experts, batch in product(meshes, sizes, sizes, (0, 1), sizes, batches):
        if mesh.ranks * stages * replicas != ranks or experts > replicas or (sharded and replicas == 1):
            continue
        if replicas % experts:
            continue
        for slices, kept, recompute, outer in product((1, 2), (True, False), (True, False), ("stages", "replicas")):
            layout = Layout(mesh, stages, replicas, bool(sharded), experts, batch, slices, kept, recompute, outer)  # type: ignore[arg-type]
            if layout.refusal(model) == "":
                yield layout


def divided(model: Transformer, cluster: Cluster, layout: Layout) -> Iterator[tuple[float, float]]:
    """Step and memory of every division of the layers among stages, or micro-batches among replicas, that fits."""
    total = model.sequences // layout.batch
    if layout.stages == 1 and not layout.is_sharded and layout.expert_ranks == 1:
        owners = [[r for r in range(len(cluster.ranks)) if layout.replica_of(r) == k] for k in range(layout.replicas)]
        every = [((model.layers,) * layout.replicas, counts) for counts in divisions(total, layout.replicas)]
    else:
        owners = [[r for r in range(len(cluster.ranks)) if layout.stage_of(r) == k] for k in range(layout.stages)]
        every = [(n, (total // layout.replicas,) * layout.stages) for n in divisions(model.layers, layout.stages)]
    costs = [stage_costs(model, cluster, layout, tuple(own)) for own in owners]
    for layers, counts in every:
        memory = []
        for place, n in enumerate(layers):
            live = layout.live(place, counts[place]) if layout.stages > 1 else 1
            memory.append(float(layout.working_bytes(model) + n * layout.layer_bytes(model, live)))
        if any(
            need > min(cluster.ranks[r].memory_bytes for r in own) for need, own in zip(memory, owners, strict=True)
        ):
            continue
        units = [n * unit + edge for n, (unit, _, edge, *_) in zip(layers, costs, strict=True)]
        fills = [n * fill + edge / layout.slices for n, (_, fill, edge, *_) in zip(layers, costs, strict=True)]
        links = [
            m * n * per_item + n * once + m * ends
            for n, m, (_, _, _, per_item, once, ends, _) in zip(layers, counts, costs, strict=True)
        ]
        times = [m * unit for m, unit in zip(counts, units, strict=True)]
        pipeline = max(times)
        if layout.stages > 1:
            slowest = [place for place, time in enumerate(times) if time == pipeline]
            pipeline += min(sum(fills) - fills[place] for place in slowest) + sum(cost[6] for cost in costs)
        yield max(pipeline, *links), max(memory)


def stage_costs(model: Transformer, cluster: Cluster, layout: Layout, ranks: tuple[int, ...]) -> tuple[float, ...]:
    """Seconds: of a layer a micro-batch and its longest slice; of the boundary gathering; of a layer the link with each
    micro-batch and once a step; of the boundary the link and the arrival."""
    speed = min(cluster.ranks[r].speed_flops for r in ranks) * layout.mesh.ranks
    cuts = layout.slices
    forwards = 2 if layout.recompute else 1
    tokens = layout.batch * model.length
    slice_flop = [model.forward_flop(tokens / cuts, model.length * (i + 0.5) / cuts) for i in range(cuts)]
    assert math.isclose(sum(slice_flop), model.forward_flop(tokens))
    launch = (forwards + 1) * model.launch_s

    def seconds(exchanges: list[Exchange], parts: int = 1, latency: bool = True) -> float:
        found = 0.0
        for exchange in exchanges:
            load = cluster.load(exchange, ranks)
            found += exchange.rounds * (
                load.seconds(cluster.links, exchange.size_bytes) / parts + load.latency_s * latency
            )
        return found

    own = [exchange for exchange in layout.exchanges(model) if not exchange.is_parameters]
    moved = [exchange for exchange in layout.exchanges(model) if exchange.when != "step"]
    once = [exchange for exchange in layout.exchanges(model) if exchange.when == "step"]
    boundary = list(layout.boundary(model, layout.stage_of(ranks[0])))
    gathers = [exchange for exchange in boundary if exchange.kind == "all_gather"]
    sends = [exchange for exchange in boundary if exchange.kind == "send"]
    return (
        cuts * seconds(own, cuts) + (forwards + 2) * sum(slice_flop) / speed + cuts * launch,
        seconds(own, cuts) + (forwards + 2) * slice_flop[-1] / speed + launch,
        cuts * seconds(gathers, cuts),
        seconds(moved, latency=False),
        seconds(once, latency=False),
        seconds(boundary, latency=False),
        seconds(sends, cuts),
    )


RANKS = st.builds(Rank, st.sampled_from([1e12, 2e12, 3e12]), st.sampled_from([3e4, 6e4, 1e5, 1e9]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(RANKS, min_size=1, max_size=2), min_size=1, max_size=3),
    st.sampled_from([1e8, 1e11, 1e14]),
    st.integers(1, 3),
    st.sampled_from([1, 4]),
    st.integers(2, 4),
)
def test_the_best_is_the_fastest_of_all(
    hosts: list[list[Rank]], rate_bps: float, slower: int, experts: int, layers: int
) -> None:
    model = dataclasses.replace(MODEL, experts=experts, top_k=min(2, experts), layers=layers)
    links = Links(Link(rate_bps, 1e-9), Link(rate_bps / 10**slower, 1e-8))
    cluster = Cluster(hosts, links)
    every = [costs for own in every_layout(model, len(cluster.ranks)) for costs in divided(model, cluster, own)]
    if not every:
        with pytest.raises(ConfigError, match=r"too small for any layout: .* needs .* GiB on rank"):
            parallelism(model, hosts, links, slices=(2,))
        return
    found = parallelism(model, hosts, links, slices=(2,))
    assert found.best.step_s == pytest.approx(min(step for step, _ in every))
    assert sum(found.best.parts.values()) == pytest.approx(found.best.step_s)
    for prediction in found.frontier:
        same = [own for own in divided(model, cluster, prediction.layout) if own[0] == pytest.approx(prediction.step_s)]
        assert any(memory == pytest.approx(prediction.memory_bytes) for _, memory in same)
    steps = [prediction.step_s for prediction in found.frontier]
    assert steps == sorted(steps)
    memories = [prediction.memory_bytes for prediction in found.frontier]
    assert memories == sorted(set(memories), reverse=True)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([1, 3, 4, 6, 8]).flatmap(lambda n: st.lists(RANKS, min_size=n, max_size=n)),
    st.sampled_from([1e8, 1e11, 1e14]),
)
def test_every_layout_is_tried(ranks: list[Rank], rate_bps: float) -> None:
    """Nothing on the list of all layouts is faster, or equals the frontier in time with less memory."""
    hosts, links = [ranks], Links(Link(rate_bps), Link(rate_bps))
    cluster = Cluster(hosts, links)
    every = [predict(MODEL, cluster, layout) for layout in every_layout(MODEL, len(ranks))]
    fitting = [prediction for prediction in every if isinstance(prediction, Prediction)]
    if not fitting:
        return
    found = parallelism(MODEL, hosts, links, slices=(2,))
    for own in fitting:
        assert any(
            prediction.step_s <= own.step_s * (1 + 1e-9) and prediction.memory_bytes <= own.memory_bytes
            for prediction in found.frontier
        )


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_pipeline_takes_as_long_as_its_simulation(count: int) -> None:
    """Four equal stages, one micro-batch each sequence, on links that take no time."""
    model = dataclasses.replace(MODEL, sequences=count, launch_s=0.0)
    links = Links(Link(math.inf), Link(math.inf))
    found = predict(model, Cluster([[Rank(1e6, 1e9)] * 4], links), Layout(stages=4))
    assert isinstance(found, Prediction)
    forward_s = model.forward_flop(model.length) / 1e6
    right = simulate(one_f_one_b(4, count), [StageCosts(forward_s, 2 * forward_s)] * 4)
    assert found.step_s == pytest.approx(right.step_s)
    assert found.fill_s == pytest.approx(right.bubble_s)


def test_token_slices_cut_the_bubble() -> None:
    """4 stages and 4 sequences: 3 of 7 units without, 3 of 19 with 4 slices, but for the attention of the last."""
    model = dataclasses.replace(MODEL, layers=4, sequences=4, width=1024, launch_s=0.0)
    cluster = Cluster([[Rank(1e12, 1e12)] * 4], Links(Link(math.inf), Link(math.inf)))
    shares = []
    for slices in (1, 4):
        found = predict(model, cluster, Layout(stages=4, slices=slices))
        assert isinstance(found, Prediction)
        shares.append(found.fill_s / found.step_s)
    assert shares == pytest.approx([3 / 7, 3 / 19], rel=0.01)


def steps_by_family(tokens: int, ranks: int = 8) -> dict[str, float]:
    """Steps of one layer in units of 4096^2 values, on hosts of one rank whose links are all that takes time."""
    width = 4096
    model = Transformer(1, width, heads=64, length=256, sequences=tokens // 256)
    cluster = Cluster([[Rank(1e30, 1e30)]] * ranks, Links(Link(1e9), Link(1e9)))
    unit_s = 8 * width**2 * model.value_bytes / 1e9
    found = {}
    for name, layout in {
        "1-D": Layout(Mesh.of("1-D", ranks), batch=model.sequences),
        "3-D": Layout(Mesh.of("3-D", ranks), batch=model.sequences),
        "FSDP": Layout(replicas=ranks, is_sharded=True, batch=model.sequences // ranks, kept=False),
        "FSDP, kept": Layout(replicas=ranks, is_sharded=True, batch=model.sequences // ranks),
    }.items():
        assert layout.refusal(model) == ""
        result = predict(model, cluster, layout)
        assert isinstance(result, Prediction)
        found[name] = result.step_s / unit_s
    return found


def test_three_dimensions_win_between_a_width_and_seven() -> None:
    """8 ranks, n h tokens: 1-D 7 n, 3-D 4 n + 3, FSDP 31.5, or 21 where it keeps what it has gathered, in h^2.

    So 3-D wins for 1 < n < 7.1, by 1.5x at most (n = 4.5), and beside FSDP that keeps for n < 4.5, by 1.4x (n = 3).
    """
    for n in (0.5, 3, 4.5, 15):
        expected = {"1-D": 7 * n, "3-D": 4 * n + 3, "FSDP": 31.5, "FSDP, kept": 21}
        assert steps_by_family(int(n * 4096)) == pytest.approx(expected)


def test_three_dimensions_win_more_with_64_ranks() -> None:
    """1.5 n + 1.125 beside 7.9 n of 1-D and 35.4 of FSDP: 4.5x at most, at n = 4.5."""
    steps = steps_by_family(int(4.5 * 4096) - 4096 // 2, 64)
    assert steps == pytest.approx({"1-D": 31.5, "3-D": 7.125, "FSDP": 35.4375, "FSDP, kept": 23.625})


def test_a_pipeline_wins_on_ethernet_and_tensor_parallelism_stays_within_hosts() -> None:
    model = Transformer(32, 4096, 32, 2048, sequences=64)
    hosts = [[Rank(60e12, 24 * GIB)] * 2] * 4
    found = parallelism(model, hosts, Links(Link(2e11, 5e-6), Link(1e9, 5e-5)))
    assert found.best.layout.stages == 8
    by_name = {family.name: family for family in found.families}
    assert by_name[found.best.layout.family].reason.startswith("the fastest, ")
    assert "exchanges of activations" in by_name["1-D TP"].reason
    assert by_name["2-D TP"].reason == "cannot run: ranks=8 is no square, which 2-D needs; give 4 or 9"
    assert by_name["EP"].reason == "cannot run: the model has one expert"
    assert by_name["DP"].reason.startswith("does not fit: DP (8 replicas, ")
    mixed = by_name["1-D TP x PP"].best
    assert mixed is not None
    assert mixed.layout.mesh.ranks == 2


def test_fast_hosts_get_more() -> None:
    hosts = [[Rank(3e12, GIB)], [Rank(1e12, GIB)]]
    replicas = parallelism(MODEL, hosts, FAST, families=("DP",)).best
    assert replicas.microbatches == (6, 2)
    stages = parallelism(dataclasses.replace(MODEL, layers=8), hosts, FAST, families=("PP",)).best
    assert stages.layers == (6, 2)


def test_bytes_and_messages_of_a_step() -> None:
    """4 layers of 12 h^2 parameters between 4 replicas: 2 x 3/4 of them, 6 messages a layer."""
    found = parallelism(MODEL, [[Rank(1e12, GIB)] * 4], FAST, families=("DP",)).best
    assert found.received_bytes == 4 * 2 * 3 * 12 * 64 // 4 * 2
    assert found.messages == 4 * 6


def test_bad_input_is_named() -> None:
    hosts, links = [[Rank(1e12, GIB)] * 8], FAST
    with pytest.raises(ConfigError, match="families: '4-D TP' is unknown; combine DP, FSDP"):
        parallelism(MODEL, hosts, links, families=("4-D TP",))
    with pytest.raises(ConfigError, match="among 8 ranks: 2-D TP: ranks=8 is no square"):
        parallelism(MODEL, hosts, links, families=("2-D TP",))
    with pytest.raises(ConfigError, match="among 4 ranks: 3-D TP: ranks=4 is no cube"):
        parallelism(MODEL, [hosts[0][:4]], links, families=("3-D TP",))
    with pytest.raises(ConfigError, match="EP: the model has one expert"):
        parallelism(MODEL, hosts, links, families=("EP",))
    with pytest.raises(ConfigError, match="EP: 4 experts and 8 replicas cannot be divided by 8 ranks"):
        parallelism(dataclasses.replace(MODEL, experts=4), hosts, links, families=("EP",))
    with pytest.raises(ConfigError, match="1-D TP: heads=3 is no multiple of 8"):
        parallelism(dataclasses.replace(MODEL, width=9, heads=3), hosts, links, families=("1-D TP",))
    with pytest.raises(ConfigError, match=r"slices\[1\]=1 is not valid"):
        parallelism(MODEL, hosts, links, slices=(2, 1))
    with pytest.raises(ConfigError, match=r"hosts\[0\] has no ranks"):
        parallelism(MODEL, [[]], links)
    with pytest.raises(ConfigError, match=r"Link\.rate_bps=nan is not above 0"):
        parallelism(MODEL, hosts, Links(Link(1e9), Link(float("nan"))))


def test_memory_that_nothing_fits_names_the_nearest_layout() -> None:
    with pytest.raises(
        ConfigError, match=r"memory_bytes=10 is too small for any layout: \S.* \(.*\) needs .* of 0\.00 GiB on rank \d"
    ):
        parallelism(MODEL, [[Rank(1e12, 10)] * 4], FAST)
