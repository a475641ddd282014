"""The orders of docs/planner.md: zero bubble as torch has it, shifted as Merak describes it; their table."""

import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

from bench.pipeline_orders import PAGE, shifted, table, zero_bubble
from commlayer.errors import ConfigError
from commlayer.scheduler.actions import Action, Order, actions_of, peak_activations
from commlayer.scheduler.simulate import StageCosts, simulate


def test_the_page_has_the_models_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def text(order: Order, rank: int) -> str:
    return " ".join(f"{action.stage}{action.kind}{action.microbatch}" for action in order[rank])


def test_torchs_zero_bubble_is_ours() -> None:
    for ranks, microbatches in ((1, 2), (3, 6), (4, 5), (4, 8)):
        stage = mock.create_autospec(PipelineStage, instance=True)
        stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks, None
        theirs = actions_of(ScheduleInterleavedZeroBubble([stage], microbatches))
        computations = [[action for action in actions if not action.kind.startswith("SEND")] for actions in theirs]
        assert computations == zero_bubble(ranks, microbatches)


def test_shifted() -> None:
    order = shifted(3, 4)
    assert text(order, 0) == "0F0 0F1 0F2 0R0 0B0 0F3 0R1 0B1 0R2 0B2 0R3 0B3"
    assert text(order, 1) == "1F0 1F1 1F2 1R0 1B0 1R1 1B1 1F3 1R2 1B2 1R3 1B3"
    assert text(order, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (2, 4), (3, 3), (3, 4)])
def test_no_order_with_the_memory_of_shifted_is_faster(ranks: int, microbatches: int) -> None:
    costs = [StageCosts(1, 2)] * ranks
    ours = shifted(ranks, microbatches)
    every = [
        list(every_order(rank, microbatches, peak_activations(ours[rank]), repeats=rank < ranks - 1))
        for rank in range(ranks)
    ]
    assert [len(orders) for orders in every[:2]] == [{3: 12, 4: 51}[microbatches], 1 if ranks == 2 else len(every[0])]
    found = [step_s for order in itertools.product(*every) if (step_s := step_of(order, costs)) is not None]
    assert len(found) > 10
    assert simulate(ours, costs).step_s == min(found)


def every_order(
    rank: int, microbatches: int, most: float, *, repeats: bool, done: tuple[int, int, int] = (0, 0, 0)
) -> Iterator[list[Action]]:
    """Every order of one rank that keeps at most so many micro-batches and repeats one forward at a time."""
    forwards, repeated, backwards = done
    if backwards == microbatches:
        yield []
    following = []
    if forwards < microbatches and forwards - backwards < most:
        following.append((Action("F", rank, forwards), (forwards + 1, repeated, backwards)))
    if repeats and repeated < forwards and repeated == backwards:
        following.append((Action("R", rank, repeated), (forwards, repeated + 1, backwards)))
    if backwards < (repeated if repeats else forwards):
        following.append((Action("B", rank, backwards), (forwards, repeated, backwards + 1)))
    for action, then in following:
        yield from ([action, *rest] for rest in every_order(rank, microbatches, most, repeats=repeats, done=then))


def step_of(order: Order, costs: list[StageCosts]) -> float | None:
    """Seconds of a step; None if the ranks wait for each other."""
    try:
        return simulate(order, costs, steps=4).step_s
    except ConfigError:
        return None
