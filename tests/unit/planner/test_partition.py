"""Partitions against every possible one."""

import math
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.planner.costs import Costs, Layer, Link
from commlayer.planner.partition import Limits, partition

numbers = st.integers(0, 20)
layers = st.builds(Layer, numbers, numbers, numbers, numbers, output_bytes=numbers)


def stage_time(costs: Costs, cuts: tuple[int, ...], stage: int, overlap: bool, recompute: bool) -> float:
    own = costs.layers[cuts[stage] : cuts[stage + 1]]
    compute = sum((2 if recompute else 1) * layer.forward_s + layer.backward_s for layer in own)
    ends = [cuts[stage + 1] - 1] * (stage < len(cuts) - 2) + [cuts[stage] - 1] * (stage > 0)
    transfer = sum(8 * costs.layers[end].sent_bytes / costs.link.rate_bps for end in ends)
    return max(compute, transfer) if overlap else compute + transfer


def exhaustive(costs: Costs, stages: int, limits: Limits, overlap: bool, recompute: bool) -> float:
    """The least time of the slowest stage over all partitions that fit."""
    best = math.inf
    for inner in combinations(range(1, len(costs.layers)), stages - 1):
        cuts = (0, *inner, len(costs.layers))
        live = limits.live or [1] * stages
        shares = limits.shares or [1.0] * stages
        memory = [costs.memory_bytes(cuts[s], cuts[s + 1], live=live[s], recompute=recompute) for s in range(stages)]
        assert isinstance(limits.memory_bytes, (int, float))
        if max(memory) <= limits.memory_bytes:
            times = [stage_time(costs, cuts, s, overlap, recompute) / shares[s] for s in range(stages)]
            best = min(best, max(times))
    return best


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(layers, min_size=1, max_size=8), st.booleans(), st.booleans())
def test_partition_is_the_best_of_all(data: st.DataObject, chain: list[Layer], overlap: bool, recompute: bool) -> None:
    costs = Costs(chain, Link(rate_bps=data.draw(st.sampled_from([4, 8, 80]))))
    stages = data.draw(st.integers(1, len(chain)))
    limits = Limits(
        memory_bytes=data.draw(st.one_of(st.just(math.inf), st.integers(1, 600))),
        live=data.draw(st.one_of(st.none(), st.lists(st.integers(1, 4), min_size=stages, max_size=stages))),
        shares=data.draw(st.one_of(st.none(), st.lists(st.sampled_from([0.5, 1.0]), min_size=stages, max_size=stages))),
    )
    best = exhaustive(costs, stages, limits, overlap, recompute)
    if best == math.inf:
        with pytest.raises(ConfigError, match="is too small") as error:
            partition(costs, stages, limits, overlap=overlap, recompute=recompute)
        least = float(str(error.value).partition("best partition needs ")[2].split()[0])
        enough = Limits(least, limits.live, limits.shares)
        assert partition(costs, stages, enough, overlap=overlap, recompute=recompute).time_s < math.inf
        assert exhaustive(costs, stages, Limits(least - 1, limits.live), overlap, recompute) == math.inf
        return
    found = partition(costs, stages, limits, overlap=overlap, recompute=recompute)
    assert found.time_s == pytest.approx(best)
    assert exhaustive_time(costs, found.cuts, limits, overlap, recompute) == pytest.approx(best)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(layers, min_size=1, max_size=6), st.integers(1, 400))
def test_stages_recompute_as_needed(data: st.DataObject, chain: list[Layer], memory_bytes: int) -> None:
    """The best of all partitions and of all sets of stages that recompute; no stage does that fits without."""
    costs = Costs(chain, Link(rate_bps=8))
    stages = data.draw(st.integers(1, len(chain)))
    live = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    best = math.inf
    for inner in combinations(range(1, len(chain)), stages - 1):
        cuts = (0, *inner, len(chain))
        for ways in product((False, True), repeat=stages):
            sizes = [costs.memory_bytes(*cuts[s : s + 2], live=live[s], recompute=ways[s]) for s in range(stages)]
            if max(sizes) <= memory_bytes:
                best = min(best, max(stage_time(costs, cuts, s, True, ways[s]) for s in range(stages)))
    limits = Limits(memory_bytes=memory_bytes, live=live)
    if best == math.inf:
        with pytest.raises(ConfigError, match="is too small"):
            partition(costs, stages, limits, overlap=True, recompute="as needed")
        return
    found = partition(costs, stages, limits, overlap=True, recompute="as needed")
    assert found.time_s == pytest.approx(best)
    kept = [costs.memory_bytes(*found.cuts[s : s + 2], live=live[s]) <= memory_bytes for s in range(stages)]
    assert [s for s in range(stages) if not kept[s]] == list(found.recomputed)


def exhaustive_time(costs: Costs, cuts: tuple[int, ...], limits: Limits, overlap: bool, recompute: bool) -> float:
    shares = limits.shares or [1.0] * (len(cuts) - 1)
    return max(stage_time(costs, cuts, s, overlap, recompute) / share for s, share in enumerate(shares))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(layers, min_size=1, max_size=7))
def test_unequal_hosts_and_two_classes_of_links(data: st.DataObject, chain: list[Layer]) -> None:
    """The best of all partitions, where ranks differ in speed and memory, and links in rate."""
    costs = Costs(chain, Link(8))
    stages = data.draw(st.integers(1, len(chain)))

    def each(values: st.SearchStrategy[float], count: int = stages) -> list[float]:
        return data.draw(st.lists(values, min_size=count, max_size=count))

    speeds, memory = each(st.sampled_from([1, 2, 4])), each(st.integers(50, 400))
    rates = each(st.sampled_from([8, 80]), stages - 1)
    best, least = math.inf, math.inf
    for inner in combinations(range(1, len(chain)), stages - 1):
        cuts = (0, *inner, len(chain))
        times, needed = [], []
        for s in range(stages):
            own = chain[cuts[s] : cuts[s + 1]]
            transfer = 8 * chain[cuts[s] - 1].sent_bytes / rates[s - 1] if s else 0
            transfer += 8 * own[-1].sent_bytes / rates[s] if s < stages - 1 else 0
            times.append(max(sum(layer.forward_s + layer.backward_s for layer in own) / speeds[s], transfer))
            needed.append(costs.memory_bytes(cuts[s], cuts[s + 1], live=1) / memory[s])
        least = min(least, max(needed))
        if max(needed) <= 1:
            best = min(best, max(times))
    limits = Limits(memory, speeds=speeds, links=[Link(rate) for rate in rates])
    if best == math.inf:
        with pytest.raises(ConfigError, match=f"the best partition needs {least:.3g} times as much"):
            partition(costs, stages, limits, overlap=True)
        return
    assert partition(costs, stages, limits, overlap=True).time_s == pytest.approx(best)


def test_a_smaller_first_segment() -> None:
    """12 equal layers in 4 stages: 3 each; with half a share for the first, 2 and the rest 3, 3, 4 in some order."""
    costs = Costs([Layer(1, 2, 0, 0)] * 12, Link(1e9))
    assert partition(costs, 4).cuts == (0, 3, 6, 9, 12)
    small = partition(costs, 4, Limits(shares=[0.5, 1, 1, 1]))
    assert small.stages[0] in {(0, 1), (0, 2)}
    assert small.time_s == 12


def test_cuts_go_where_the_output_is_small() -> None:
    """Bytes take a second each. After layer 1 the cut costs 1 s: (6, 3 + 1) for (3 + 9, 6 + 9)."""
    outputs = [9, 1, 9]
    costs = Costs([Layer(1, 2, 0, 0, output_bytes=output) for output in outputs], Link(8))
    assert partition(costs, 2).cuts == (0, 2, 3)


def test_stages_of_1f1b_keep_different_numbers_of_micro_batches() -> None:
    """4 layers of 10 bytes of activations: in two stages of two, rank 0 keeps 2 micro-batches of 20 bytes. It fits 30
    bytes with one layer only."""
    costs = Costs([Layer(1, 2, 0, 10)] * 4, Link(1e9))
    assert partition(costs, 2, Limits(memory_bytes=40, live=[2, 1])).cuts == (0, 2, 4)
    assert partition(costs, 2, Limits(memory_bytes=30, live=[2, 1])).cuts == (0, 1, 4)
    with pytest.raises(ConfigError, match="memory_bytes=20 is too small for 2 stages: the best partition needs 30"):
        partition(costs, 2, Limits(memory_bytes=20, live=[2, 1]))


def test_bad_input_is_named() -> None:
    costs = Costs([Layer(1, 2, 3, 4)] * 3, Link(1))
    with pytest.raises(ConfigError, match="stages=4 does not fit 3 layers; use 1 to 3"):
        partition(costs, 4)
    with pytest.raises(ConfigError, match=r"live=\[1\] does not fit 2 stages"):
        partition(costs, 2, Limits(live=[1]))
    with pytest.raises(ConfigError, match=r"speeds=\[1, nan\] does not fit 2 stages"):
        partition(costs, 2, Limits(speeds=[1, math.nan]))
    with pytest.raises(ConfigError, match=r"memory_bytes=\[9\] does not fit 2 stages"):
        partition(costs, 2, Limits([9]))
    with pytest.raises(ConfigError, match="links has 2 entries, and 2 stages have 1 links between them"):
        partition(costs, 2, Limits(links=[Link(1)] * 2))
    with pytest.raises(ConfigError, match=r"shares=\[1, 0\] does not fit 2 stages"):
        partition(costs, 2, Limits(shares=[1, 0]))
