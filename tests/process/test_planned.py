"""Schedules from plans: they train as torch's own of the same order."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleLoopedBFS

from commlayer.errors import ConfigError
from commlayer.frontend.pipelines.planned import attach_options, of_plan
from commlayer.planner import Costs, Layer, Link, Plan, search
from commlayer.scheduler.actions import actions_of
from tests import ranks

WIDTH, MICROBATCHES = 6, 4
COSTS = Costs([Layer(0.01, 0.02, 1e6, 1e3, output_bytes=10.0)] * 4, Link(1e8))


def plans(**options: Any) -> Iterator[Plan]:
    """The plans of two ranks without replicas."""
    for plan in search(COSTS, ranks=2, microbatches=MICROBATCHES, memory_bytes=1e12, keep=100, **options):
        if plan.choice.ranks == 2:
            yield plan


def stages(rank: int, plan: Plan) -> list[Any]:
    """Linear layers, as many in a stage as the plan says."""
    made = []
    choice, device = plan.choice, torch.device("cpu")
    for index in range(rank, choice.ranks * choice.chunks, choice.ranks):
        layers = []
        for number in range(choice.cuts[index], choice.cuts[index + 1]):
            torch.manual_seed(number)
            layers.append(nn.Linear(WIDTH, WIDTH))
        made.append(PipelineStage(nn.Sequential(*layers), index, choice.ranks * choice.chunks, device))
    return made


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def gradients(rank: int, schedule: Any, own: list[Any]) -> list[torch.Tensor | None]:
    torch.manual_seed(7)
    inputs = torch.randn(2 * MICROBATCHES, WIDTH)
    schedule.step(*((inputs,) if rank == 0 else ()), **({"target": inputs} if rank == 1 else {}))
    return [parameter.grad for stage in own for parameter in stage.submod.parameters()]


@ranks.on(2)
def test_every_plan_gives_its_order_and_the_gradients_of_one_model(rank: int, size: int) -> None:
    """The layers are the same in every plan, and so are the gradients, up to the order of their sums."""
    ranks.init(rank, size)
    expected: dict[int, torch.Tensor] = {}
    seen = set()
    for plan in plans(chunks=(1, 2), buckets=(1,)):
        choice = plan.choice
        seen.add((choice.chunks, choice.group))
        own = stages(rank, plan)
        schedule = of_plan(plan, own, loss, recomputed=rank in choice.recompute)
        order = [[a for a in actions if a.kind in ("F", "B")] for actions in actions_of(schedule)]
        assert order == [list(actions) for actions in choice.order()]
        found = iter(gradients(rank, schedule, own))
        for index in range(rank, choice.ranks * choice.chunks, choice.ranks):
            for number in range(choice.cuts[index], choice.cuts[index + 1]):
                weight, bias = next(found), next(found)
                assert weight is not None
                assert bias is not None
                torch.testing.assert_close(weight, expected.setdefault(number, weight))
    assert seen >= {(1, None), (2, None), (2, 2), (2, 4)}
    dist.destroy_process_group()


@ranks.on(2)
def test_the_order_is_that_of_torch(rank: int, size: int) -> None:
    ranks.init(rank, size)
    kinds: list[tuple[Any, int]] = [(Schedule1F1B, 1), (ScheduleLoopedBFS, 2)]
    for kind, chunks in kinds:
        plan = next(p for p in plans(chunks=(chunks,)) if p.choice.group is None and not p.choice.recompute)
        own = stages(rank, plan)
        ours, theirs = of_plan(plan, own, loss), kind(own[0] if chunks == 1 else own, MICROBATCHES, loss_fn=loss)
        assert actions_of(ours) == actions_of(theirs)
    dist.destroy_process_group()


@ranks.on(2)
def test_stages_that_are_not_of_the_plan_are_refused(rank: int, size: int) -> None:
    ranks.init(rank, size)
    plan = next(p for p in plans(chunks=(2,)) if not p.choice.recompute)
    own = stages(rank, plan)
    of_plan(plan, own, loss)
    with pytest.raises(ConfigError, match=r"keeps activations on rank \d; leave recomputed=True"):
        of_plan(plan, own, loss, recomputed=True)
    saving = dataclasses.replace(plan, choice=dataclasses.replace(plan.choice, recompute=(0, 1)))
    with pytest.raises(ConfigError, match=r"recomputes activations on rank \d; use torch\.utils"):
        of_plan(saving, own, loss)
    with pytest.raises(ConfigError, match=rf"rank {rank} of 2 has the stages \[{rank}\] of 4"):
        of_plan(plan, own[:1], loss)
    with pytest.raises(ConfigError, match="make the plan's stages"):
        of_plan(plan, own[::-1], loss)
    other = dataclasses.replace(plan, choice=dataclasses.replace(plan.choice, chunks=1))
    with pytest.raises(ConfigError, match="of 2 there"):
        of_plan(other, own, loss)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("step", {"defer": False, "staleness": 0}),
        ("deferred", {"defer": True, "staleness": 0}),
        ("stale", {"defer": True, "staleness": 1}),
    ],
)
def test_options_of_attach(mode: str, expected: dict[str, Any]) -> None:
    found = search(COSTS, ranks=2, microbatches=4, memory_bytes=1e12, staleness=(0, 1), keep=200)
    plan = next(p for p in found if p.choice.reduction.mode == mode and p.choice.reduction.buckets == 1)
    assert attach_options(plan) == expected
    several = dataclasses.replace(plan.choice.reduction, buckets=8)
    with pytest.raises(ConfigError, match="8 buckets per stage"):
        attach_options(dataclasses.replace(plan, choice=dataclasses.replace(plan.choice, reduction=several)))
