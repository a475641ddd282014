"""The discrete-event model against arithmetic by hand.

The case: p = 4 ranks, M = 16 micro-batches, v = 4 chunks. A rank's stage of a micro-batch takes F = 1 and B = 2, a
chunk a quarter of both. Sends take no time and have a link of their own. 1F1B computes for (M + p - 1)(F + B) = 57. The
reduction takes 44 % of the serial step: C = 57 * 0.44 / 0.56 = 44.79 per rank. Tb = M B = 32 is the backward of a rank,
8 of each of its chunks.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.scheduler.actions import Action, Mode, Order, Reduction
from commlayer.scheduler.link import Discipline, Network
from commlayer.scheduler.pipelines import breadth_first, interleaved, one_f_one_b
from commlayer.scheduler.simulate import Simulation, StageCosts, simulate

FIFO = Network(discipline="fifo", shared=False)
SHARE = 0.44


def communication(ranks: int, microbatches: int, share: float = SHARE) -> float:
    """C: the reduction that takes `share` of the step of 1F1B with the reduction at its end."""
    return (microbatches + ranks - 1) * 3 * share / (1 - share)


def stages(ranks: int, chunks: int, reduce_s: float) -> list[StageCosts]:
    """F = 1 and B = 2 per rank, cut into `chunks`; the rank's reduction takes `reduce_s`."""
    return [StageCosts(1 / chunks, 2 / chunks, reduce_s=reduce_s / chunks)] * (ranks * chunks)


def aiao(mode: Mode, network: Network | None = None, buckets: int = 1, share: float = SHARE) -> Simulation:
    costs = stages(4, 4, communication(4, 16, share))
    return simulate(breadth_first(4, 16, 4), costs, Reduction(mode, buckets), network)


def serial(ranks: int, microbatches: int) -> float:
    costs = stages(ranks, 1, communication(ranks, microbatches))
    return simulate(one_f_one_b(ranks, microbatches), costs, Reduction("serial")).step_s


def test_serial_1f1b() -> None:
    """57 + 44.79 = 101.79."""
    result = simulate(one_f_one_b(4, 16), stages(4, 1, communication(4, 16)), Reduction("serial"))
    assert result.step_s == pytest.approx(101.79, abs=0.005)
    assert result.exposed_s == pytest.approx(44.79, abs=0.005)
    assert result.ranks[0].busy_s == pytest.approx(48)
    assert result.ranks[0].bubble_s == pytest.approx(9)  # (p - 1)(F + B)


def test_1f1b_with_eight_buckets_hides_in_the_last_micro_batch_only() -> None:
    """The first bucket starts 7/8 of a backward (2) before the end: 57 - 1.75 + 44.79 = 100.04."""
    result = simulate(one_f_one_b(4, 16), stages(4, 1, communication(4, 16)), Reduction("step", buckets=8))
    assert result.step_s == pytest.approx(100.04, abs=0.005)


def test_aiao_with_blocking_reductions() -> None:
    """Compute 48 + (p - 1)(F + B) / v = 50.25, and all of C: 95.04."""
    assert aiao("blocking").step_s == pytest.approx(95.04, abs=0.005)


@pytest.mark.parametrize("network", [Network(), FIFO])
def test_aiao_undeferred(network: Network) -> None:
    """The first chunk is ready at 50.25 - 24 = 26.25; the link is busy from then: 26.25 + 44.79 = 71.04, 1.43x."""
    result = aiao("step", network)
    assert result.step_s == pytest.approx(71.04, abs=0.005)
    assert serial(4, 16) / result.step_s == pytest.approx(1.433, abs=0.0005)
    assert result.exposed_s / communication(4, 16) == pytest.approx(0.464, abs=0.0005)
    assert result.ranks[0].bubble_s == pytest.approx(2.25)
    assert result.ranks[0].peak_activations == 64  # M v


def test_aiao_undeferred_with_eight_buckets() -> None:
    """The first bucket is ready 7/8 of a chunk's backward (0.5) earlier: 71.04 - 0.4375 = 70.60, 1.442x."""
    assert serial(4, 16) / aiao("step", buckets=8).step_s == pytest.approx(1.442, abs=0.0005)


def test_aiao_deferred_with_priority_exposes_the_chunk_that_backward_ends_with() -> None:
    """Chunk 0 is ready at 50.25 and overtakes the others: C / v = 11.20 later the next step begins. 61.45, 1.66x.

    The rest hides: chunks 1 to 3 have 11.20 - 8 = 3.20 each left, less than the 4 that a chunk's forwards take.
    """
    result = aiao("deferred")
    assert result.step_s == pytest.approx(61.45, abs=0.005)
    assert serial(4, 16) / result.step_s == pytest.approx(1.66, abs=0.005)
    assert result.exposed_s / communication(4, 16) == pytest.approx(0.25)


def test_aiao_deferred_over_a_fifo_link_gains_nothing() -> None:
    """Chunk 0 was submitted last and is needed first: 71.04 as without deferral."""
    assert serial(4, 16) / aiao("deferred", FIFO).step_s == pytest.approx(1.433, abs=0.0005)


def test_sends_behind_reductions_undo_the_overlap() -> None:
    """Over one FIFO link, gradients between stages wait for reductions: little better than blocking (95.04)."""
    for mode in ("step", "deferred", "stale"):
        assert 90 < aiao(mode, Network("fifo")).step_s < 95.04


@pytest.mark.parametrize("network", [Network(), FIFO])
def test_stale_gradients_hide_all_communication(network: Network) -> None:
    """C = 44.79 is less than the 50.25 of compute: 2.03x."""
    result = aiao("stale", network)
    assert result.step_s == pytest.approx(50.25)
    assert serial(4, 16) / result.step_s == pytest.approx(2.03, abs=0.005)
    assert result.exposed_s == 0


@pytest.mark.parametrize(("mode", "stages"), [("stale", [12, 8, 4, 0, 12]), ("deferred", [12, 8, 4, 0, 4, 8, 12])])
def test_stale_reductions_are_sent_in_order(mode: Mode, stages: list[int]) -> None:
    """Backward passes end with stage 0. Each reduction overtakes those before it, unless it is stale."""
    spans = [span for span in aiao(mode, share=0.6).spans if span.rank == 0 and span.name.startswith("REDUCE")]
    names = (span.name for span in sorted(spans, key=lambda span: span.start_s))
    order = [name for name, _ in itertools.groupby(names)]  # sends interrupt a reduction for no time
    assert order[: len(stages)] == [f"REDUCE stage {stage}" for stage in stages]


@pytest.mark.parametrize("network", [Network(), FIFO])
def test_stale_gradients_cannot_be_faster_than_the_link(network: Network) -> None:
    """C = 57 * 0.6 / 0.4 = 85.5 is more than the 50.25 of compute."""
    assert aiao("stale", network, share=0.6).step_s == pytest.approx(85.5)


@pytest.mark.parametrize(
    ("share", "undeferred", "deferred"),
    [
        (0.20, 53.81, 53.81),  # C = 14.25: only the last chunk, C / v = 3.56, is exposed either way
        (0.30, 56.36, 56.36),  # C = 24.43
        # C = 85.5: the link is never idle from the first chunk's end (26.25) to the last chunk's next forward. That
        # chunk's backward ends 14.25 after its first forward: 85.5 + 14.25 = 99.75. Undeferred: 26.25 + 85.5.
        (0.60, 111.75, 99.75),
    ],
)
def test_other_shares_of_communication(share: float, undeferred: float, deferred: float) -> None:
    assert aiao("step", share=share).step_s == pytest.approx(undeferred, abs=0.005)
    assert aiao("deferred", share=share).step_s == pytest.approx(deferred, abs=0.005)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "breadth", "depth"),
    [(4, 8, 4, 1.47, 1.28), (4, 16, 4, 1.43, 1.14), (8, 16, 4, 1.48, 1.29), (4, 32, 2, 1.24, 1.05)],
)
def test_group_size_decides_how_much_hides(
    ranks: int, microbatches: int, chunks: int, breadth: float, depth: float
) -> None:
    """Exposed: max(C / v, C - (g / M) Tb (v - 1) / v). At p = 4, M = 8: T = 33, C = 25.93, serial 58.93; compute
    26.25; g = M exposes 25.93 - 12 = 13.93, 40.18 in all, 1.47x; g = p exposes 25.93 - 6 = 19.93, 46.18, 1.28x."""
    before, costs = serial(ranks, microbatches), stages(ranks, chunks, communication(ranks, microbatches))
    for order, gain in (
        (breadth_first(ranks, microbatches, chunks), breadth),
        (interleaved(ranks, microbatches, chunks, group=microbatches), breadth),
        (interleaved(ranks, microbatches, chunks), depth),
    ):
        assert before / simulate(order, costs).step_s == pytest.approx(gain, abs=0.005)


def ddp(mode: Mode, network: Network | None = None, *, layers: int = 8, buckets: int = 1) -> float:
    """One rank of DDP whose reductions take as long as forward (1/3) and backward (2/3) together."""
    costs = [StageCosts(1 / 3 / layers, 2 / 3 / layers, reduce_s=1 / layers)] * layers
    return simulate(breadth_first(1, 1, layers), costs, Reduction(mode, buckets), network).step_s


def test_next_forward_overlap_of_ddp() -> None:
    """Default: the first bucket is ready at 1/3 + 1/12, and the link is busy for 1 from then: 17/12.
    Deferred with priority: the last bucket's 1/8 after compute 1: 9/8, 1.26x. FIFO: as the default."""
    assert ddp("step") == pytest.approx(17 / 12)
    assert ddp("deferred") == pytest.approx(9 / 8)
    assert ddp("deferred", FIFO) == pytest.approx(17 / 12)
    assert ddp("stale") == pytest.approx(1)


@pytest.mark.parametrize("mode", ["serial", "step", "deferred", "stale"])
@pytest.mark.parametrize("network", [Network(), FIFO])
def test_buckets_of_a_stage_are_stages_of_one_layer(mode: Mode, network: Network) -> None:
    """One stage with 8 buckets runs as 8 stages of one bucket."""
    assert ddp(mode, network, layers=1, buckets=8) == pytest.approx(ddp(mode, network))


def test_more_buckets_approach_the_limit_of_ddp() -> None:
    """17/12 over 9/8 is 1.26; without end, 4/3 over 1."""
    assert ddp("step", layers=64) / ddp("deferred", layers=64) == pytest.approx(4 / 3, abs=0.02)


def test_sends_between_stages() -> None:
    """Two ranks, one micro-batch, F = 1, B = 2: F0, send 0.5, latency 0.1, F1, B1, send, latency, B0: 7.2 s."""
    order = one_f_one_b(2, 1)
    result = simulate(order, [StageCosts(1, 2, send_s=0.5)] * 2, network=Network(latency_s=0.1))
    assert result.step_s == pytest.approx(7.2)
    assert result.ranks[0].bubble_s == pytest.approx(7.2 - 3)


def explicit(order: Order) -> list[list[Action]]:
    """The sends in the order's lists, as in torch's orders with communication."""
    result: list[list[Action]] = []
    for actions in order:
        result.append([])
        for action in actions:
            result[-1].append(action)
            if action.kind == "F" and action.stage < 3:
                result[-1].append(Action("SEND_F", action.stage, action.microbatch))
            if action.kind == "B" and action.stage > 0:
                result[-1].append(Action("SEND_B", action.stage, action.microbatch))
    return result


def test_listed_sends_are_those_that_the_model_adds() -> None:
    order, costs = interleaved(2, 4, 2), [StageCosts(1, 2, send_s=0.25, reduce_s=3)] * 4
    assert simulate(explicit(order), costs) == simulate(order, costs)


@pytest.mark.parametrize(("discipline", "gradient", "reduced"), [("class", 7, 13), ("fifo", 15, 12.5)])
def test_sends_overtake_reductions_by_class_only(discipline: Discipline, gradient: float, reduced: float) -> None:
    """Rank 1 starts a reduction (10 s), then sends the gradient (0.5 s) for which rank 0 waits.

    Both: F0 0 to 1, send to 1.5, F1 to 2.5, reduction from 2.5, B1 to 4.5. By class: send to 5, B0 to 7, and the
    reduction ends at 2.5 + 10 + 0.5 = 13. FIFO: the reduction ends at 12.5, the send at 13, B0 at 15.
    """
    lists = [
        [Action("F", 0), Action("B", 0)],
        [Action("F", 1), Action("REDUCE", 1), Action("B", 1), Action("WAIT", 1)],
    ]
    costs = [StageCosts(1, 2, send_s=0.5), StageCosts(1, 2, reduce_s=10)]
    spans = simulate(lists, costs, network=Network(discipline)).spans
    ends = {span.name: span.end_s for span in reversed(spans)}  # those of the first step
    assert ends["B stage 0 mb 0"] == pytest.approx(gradient)
    assert ends["WAIT stage 1"] == pytest.approx(reduced)


def test_links_of_their_own_do_not_delay_each_other() -> None:
    order, costs = one_f_one_b(2, 4), [StageCosts(1, 2, send_s=0.5, reduce_s=8)] * 2
    fifo = simulate(order, costs, Reduction("stale"), Network("fifo"))
    apart = simulate(order, costs, Reduction("stale"), Network("fifo", shared=False))
    assert apart.step_s < fifo.step_s


@pytest.mark.parametrize(("hosts", "step_s"), [((), 16.0), ((0, 1), 16.0), ((0, 0), 21.0)])
def test_ranks_of_a_host_take_turns_on_its_link(hosts: tuple[int, ...], step_s: float) -> None:
    """Stage 1's last backward ends at 7, and stage 0's at 9. Their reductions take 7 each: on two links the second one
    ends at 9 + 7 = 16, on one link at 7 + 7 + 7 = 21."""
    stages = [StageCosts(1.0, 2.0, reduce_s=7.0)] * 2
    network = Network("fifo", hosts=hosts, leaves_host=(True,) * len(hosts))
    found = simulate(one_f_one_b(2, 2), stages, Reduction("step", 1), network)
    assert found.step_s == pytest.approx(step_s)


def test_weight_halves_run_when_the_order_says_so() -> None:
    """I 0.5, W 1.5 of B 2: rank 1 sends after F 1, F 1, I 0.5 and does its W while rank 0 runs I and W."""
    lists = [
        [Action("F", 0), Action("I", 0), Action("W", 0)],
        [Action("F", 1), Action("I", 1), Action("W", 1)],
    ]
    result = simulate(lists, [StageCosts(1, 2, weight_s=1.5)] * 2)
    assert result.step_s == pytest.approx(1 + 1 + 0.5 + 0.5 + 1.5)


def test_overhead_of_actions_and_optimizer() -> None:
    """One rank, M = 4: 8 actions, 3 each per micro-batch, and the update."""
    result = simulate(one_f_one_b(1, 4), [StageCosts(1, 2, update_s=0.5)], action_s=0.01)
    assert result.step_s == pytest.approx(12 + 0.08 + 0.5)


def test_the_first_step_has_no_deferred_update() -> None:
    """Steps of 3, with an update of 0.5 from the second on."""
    spans = simulate(one_f_one_b(1, 1), [StageCosts(1, 2, update_s=0.5)], Reduction("deferred"), steps=4).spans
    assert [span.start_s for span in spans if span.name == "UPDATE stage 0"] == pytest.approx([3, 6.5, 10])


def test_latency_of_a_reduction_counts_twice() -> None:
    result = simulate(one_f_one_b(1, 1), [StageCosts(1, 2, reduce_s=4)], network=Network(latency_s=0.1))
    assert result.step_s == pytest.approx(7.2)


modes = st.sampled_from(["serial", "blocking", "step", "deferred", "stale"])
times = st.integers(0, 40).map(lambda x: x / 8)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Order, list[StageCosts]]:
    ranks, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    microbatches = ranks * draw(st.integers(1, 3))
    group = ranks * draw(st.integers(1, microbatches // ranks))
    is_interleaved = draw(st.booleans())
    order = (
        interleaved(ranks, microbatches, chunks, group)
        if is_interleaved
        else breadth_first(ranks, microbatches, chunks)
    )
    costs = draw(
        st.lists(
            st.builds(StageCosts, times, times, send_s=times, reduce_s=times, update_s=times),
            min_size=ranks * chunks,
            max_size=ranks * chunks,
        )
    )
    return order, costs


@settings(max_examples=60, deadline=None)
@given(pipelines(), modes, st.integers(1, 3), st.sampled_from(["fifo", "class"]))
def test_times_add_up_and_keep_their_bounds(
    pipeline: tuple[Order, list[StageCosts]], mode: Mode, buckets: int, discipline: Discipline
) -> None:
    order, costs = pipeline
    result = simulate(order, costs, Reduction(mode, buckets), Network(discipline), steps=12)
    assert result == simulate(order, costs, Reduction(mode, buckets), Network(discipline), steps=12)
    for rank, actions in zip(result.ranks, order, strict=True):
        own = [costs[stage] for stage in {action.stage for action in actions}]
        count = len(actions) / 2 / len(own)
        busy = sum((cost.forward_s + cost.backward_s) * count + cost.update_s for cost in own)
        assert rank.busy_s == pytest.approx(busy)
        assert busy <= result.step_s + 1e-6
        assert rank.bubble_s >= 0
    if mode == "blocking" and len(order) == 1:
        reductions = sum(cost.reduce_s for cost in costs)
        assert result.step_s == pytest.approx(result.ranks[0].busy_s + reductions)


@settings(max_examples=40, deadline=None)
@given(pipelines(), st.integers(1, 3))
def test_without_reductions_all_modes_take_the_same_time(
    pipeline: tuple[Order, list[StageCosts]], buckets: int
) -> None:
    order = pipeline[0]
    costs = [dataclasses.replace(cost, reduce_s=0.0, update_s=0.0) for cost in pipeline[1]]
    steps = [simulate(order, costs, Reduction(mode, buckets)).step_s for mode in ("serial", "blocking", "step")]
    assert steps == pytest.approx([steps[0]] * 3)
    assert simulate(order, costs, Reduction("stale")).step_s <= steps[0] + 1e-6


def test_trace(tmp_path: Path) -> None:
    aiao("deferred").trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert any(event["name"] == "WAIT stage 0" and event["dur"] > 11e6 for event in events)


@pytest.mark.parametrize(
    ("lists", "count", "message"),
    [
        ([[Action("B", 0), Action("F", 0)], [Action("F", 1), Action("B", 1)]], 2, "rank 0 at B stage 0 mb 0; rank 1"),
        ([[Action("F", 0), Action("B", 0)]], 2, "no rank runs stage 1"),
        ([[Action("F", 1), Action("B", 1)]], 1, "F stage 1 mb 0 has no costs; `stages` has 1"),
        ([[Action("F", 0)], [Action("B", 0)]], 1, "stage 0 is on ranks 0 and 1"),
    ],
)
def test_bad_orders_are_named(lists: Order, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(lists, [StageCosts(1, 2)] * count)


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="forward_s=-1"):
        StageCosts(-1, 2)
    with pytest.raises(ConfigError, match="reduce_s=inf"):
        StageCosts(1, 2, reduce_s=float("inf"))
    with pytest.raises(ConfigError, match="weight_s=3 exceeds backward_s=2"):
        StageCosts(1, 2, weight_s=3)
    with pytest.raises(ConfigError, match="steps=3 is below 4"):
        simulate(one_f_one_b(1, 1), [StageCosts(1, 2)], steps=3)
    with pytest.raises(ConfigError, match="action_s=-1"):
        simulate(one_f_one_b(1, 1), [StageCosts(1, 2)], action_s=-1)
