"""torch.distributed.pipelining: activations and gradients go between stages by point-to-point messages."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from tests.process.compat.gloo import same_as_gloo

WIDTH = 16


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _pipeline(rank: int, size: int, name: str) -> Any:
    kind: Any = {made.__name__: made for made in SCHEDULES}[name]
    stages_per_rank = 2 if "Interleaved" in name else 1
    stages_total = stages_per_rank * size
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages_total)]
    mine = [
        PipelineStage(layers[index], index, stages_total, torch.device("cpu"))
        for index in range(rank, stages_total, size)
    ]
    schedule = kind(mine if stages_per_rank > 1 else mine[0], n_microbatches=4, loss_fn=_loss)
    x = torch.randn(8, WIDTH)
    losses: list[Any] = []
    outputs = []
    for _ in range(2):
        arguments = (x,) if rank == 0 else ()
        # The last stage lies on the last rank.
        extra = {"target": torch.zeros(8, WIDTH), "losses": losses} if rank == size - 1 else {}
        outputs.append(schedule.step(*arguments, **extra))
    gradients = [p.grad for index in range(rank, stages_total, size) for p in layers[index].parameters()]
    return [losses, outputs if rank == size - 1 else [], gradients]


SCHEDULES = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)


@pytest.mark.parametrize("name", [schedule.__name__ for schedule in SCHEDULES])
def test_schedule(name: str) -> None:
    same_as_gloo(_pipeline, 2, name)


def test_three_stages() -> None:
    same_as_gloo(_pipeline, 3, "Schedule1F1B")
