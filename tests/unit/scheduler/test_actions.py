"""Actions from torch's schedules, and where reductions, waits and updates are put."""

from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from commlayer.errors import ConfigError
from commlayer.scheduler.actions import Action, Mode, Order, Reduction, actions_of, peak_activations, with_reductions
from commlayer.scheduler.pipelines import breadth_first, interleaved, one_f_one_b
from commlayer.scheduler.simulate import StageCosts, simulate


def torch_schedule(kind: Any, ranks: int, microbatches: int, chunks: int = 1) -> Any:
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks * chunks, None
    return kind(stage if kind in (Schedule1F1B, ScheduleGPipe) else [stage] * chunks, microbatches)


def computations(order: Order) -> list[list[Action]]:
    return [[action for action in actions if not action.kind.startswith("SEND")] for actions in order]


def test_torch_1f1b_is_ours() -> None:
    assert actions_of(torch_schedule(Schedule1F1B, 4, 8)) == one_f_one_b(4, 8)


def test_torch_looped_bfs_is_ours() -> None:
    order = actions_of(torch_schedule(ScheduleLoopedBFS, 4, 8, 2))
    assert computations(order) == breadth_first(4, 8, 2)
    assert sum(action.kind == "SEND_F" for actions in order for action in actions) == 7 * 8


def test_torch_interleaved_takes_as_long_as_ours() -> None:
    costs = [StageCosts(1, 2, send_s=0.125, reduce_s=5)] * 8
    theirs = simulate(torch_schedule(ScheduleInterleaved1F1B, 4, 8, 2), costs, Reduction("deferred"))
    assert theirs.step_s == pytest.approx(simulate(interleaved(4, 8, 2), costs, Reduction("deferred")).step_s, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [(ScheduleGPipe, 1), (ScheduleInterleavedZeroBubble, 2), (ScheduleZBVZeroBubble, 2)],
)
@pytest.mark.parametrize("mode", ["serial", "blocking", "step", "deferred", "stale"])
def test_every_torch_schedule_runs(kind: Any, chunks: int, mode: Mode) -> None:
    schedule = torch_schedule(kind, 4, 8, chunks)
    costs = [StageCosts(1, 2, send_s=0.125, reduce_s=5)] * (4 * chunks)
    result = simulate(schedule, costs, Reduction(mode, buckets=2))
    assert result.ranks[0].busy_s == pytest.approx(24 * chunks)
    assert result.step_s >= 24 * chunks
    kinds = {action.kind for actions in actions_of(schedule) for action in actions}
    assert ("W" in kinds) == (kind is not ScheduleGPipe)


def test_zero_bubble_has_less_bubble_than_1f1b() -> None:
    costs = [StageCosts(1, 2)] * 8
    zero = simulate(torch_schedule(ScheduleInterleavedZeroBubble, 4, 8, 2), costs)
    assert zero.step_s < simulate(interleaved(4, 8, 2), costs).step_s


def short(actions: list[Action]) -> str:
    return " ".join(
        f"{a.kind}{a.stage}.{a.part}" if a.kind in ("REDUCE", "WAIT", "UPDATE") else a.kind for a in actions
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("serial", "F F B B REDUCE1.0 REDUCE0.0 WAIT1.0 WAIT0.0 UPDATE1.0 UPDATE0.0"),
        ("blocking", "F F B REDUCE1.0 WAIT1.0 B REDUCE0.0 WAIT0.0 UPDATE1.0 UPDATE0.0"),
        ("step", "F F B REDUCE1.0 B REDUCE0.0 WAIT1.0 WAIT0.0 UPDATE1.0 UPDATE0.0"),
        ("deferred", "WAIT0.0 UPDATE0.0 F WAIT1.0 UPDATE1.0 F B REDUCE1.0 B REDUCE0.0"),
        ("stale", "WAIT0.0 UPDATE0.0 F WAIT1.0 UPDATE1.0 F B REDUCE1.0 B REDUCE0.0"),
    ],
)
def test_places_of_reductions(mode: Mode, expected: str) -> None:
    (actions,) = with_reductions(breadth_first(1, 1, 2), Reduction(mode))
    assert short(actions) == expected
    assert {action.steps_ago for action in actions} == {0, {"deferred": 1, "stale": 2}.get(mode, 0)}


def test_buckets_wait_in_the_reverse_order_of_backward() -> None:
    (actions,) = with_reductions([[Action("F", 0), Action("I", 0), Action("W", 0)]], Reduction("deferred", 2))
    assert short(actions) == "WAIT0.1 UPDATE0.1 F WAIT0.0 UPDATE0.0 F I W REDUCE0.0 W REDUCE0.1"


def test_peak_of_activations_in_bytes() -> None:
    lists = [Action("F", 0), Action("F", 1), Action("I", 1), Action("F", 0, 1), Action("W", 1), Action("B", 0)]
    assert peak_activations(lists) == 3
    assert peak_activations(lists, {0: 10, 1: 100}) == 120


@pytest.mark.parametrize("schedule", [None, [], "1F1B", object()])
def test_what_has_no_order_is_refused(schedule: object) -> None:
    with pytest.raises(ConfigError, match="has no pipeline_order"):
        actions_of(schedule)


def test_unknown_actions_and_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="'0F0' is unknown"):
        actions_of([["0F0"]])
    with pytest.raises(ConfigError, match="mode='later' is unknown; use one of serial, blocking"):
        Reduction("later")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="buckets=0 is not valid"):
        Reduction(buckets=0)
