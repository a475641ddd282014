"""A job that runs a plan of the planner on every rank: layers whose computation is a sleep, real messages and sums."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleLoopedBFS
from torch.nn.functional import mse_loss

import commlayer
from bench.harness import turns
from bench.harness.turns import Accelerator, Log
from commlayer.frontend.pipelines.measure import measure
from commlayer.planner.costs import Costs, Layer, Link
from commlayer.planner.plan import Choice, Plan
from commlayer.scheduler.actions import Reduction

COSTS = "costs"
"""The job that measures the planner's input."""
UNIT_S = 0.008
"""Seconds of the forward pass of a layer of weight 1, on a rank of speed 1; its backward pass takes twice as long."""
FORWARD = (1, 2, 1, 3, 1, 2, 1, 1)
"""Weights of the layers' computations."""
KILOBYTES = (400, 100, 100, 800, 100, 200, 100, 400)
"""Parameters of the layers, float32."""
WIDTH = 8192
"""Values of an activation of one micro-batch: 32 KiB."""
MICROBATCHES = 8
"""Of a step, over all replicas."""
WARM_UP, STEPS = 2, 3
UNKNOWN = Costs((Layer(0.0, 0.0, 0.0, 0.0),), Link(1.0))


class Sleeper(nn.Module):
    """Layer `number` of the model, on a rank of this speed."""

    def __init__(self, number: int, speed: float) -> None:
        super().__init__()
        self.seconds = FORWARD[number] * UNIT_S / speed
        self.weight = nn.Parameter(torch.ones(KILOBYTES[number] * 250))

    def forward(self, values: Tensor) -> Tensor:
        computed: Tensor = Accelerator.apply(values, self.seconds)  # type: ignore[no-untyped-call]
        return computed * self.weight[0]


def plan_of(table: dict[str, Any]) -> Plan:
    """The plan of a job: its choice, without a prediction."""
    made = {**table, "reduction": Reduction(table["mode"], 1), "cuts": tuple(table["cuts"])}
    made.pop("mode")
    return Plan(Choice(**made, group=None, recompute=()), UNKNOWN, 0.0, 0.0, 0.0, 0.0, 0.0)


class Job:
    """The pipeline of this rank, by the plan."""

    def __init__(self, plan: Plan, speed: float) -> None:
        choice = plan.choice
        names = ("pp", "dp") if choice.outer == "stages" else ("dp", "pp")
        sizes = {"pp": choice.ranks, "dp": choice.replicas}
        mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)
        self.choice, self.rank, self.dp_group = choice, mesh.get_local_rank("pp"), mesh.get_group("dp")
        group, total = mesh.get_group("pp"), choice.ranks * choice.chunks
        self.stages = [
            PipelineStage(
                nn.Sequential(*(Sleeper(layer, speed) for layer in range(*choice.cuts[stage : stage + 2]))),
                *(stage, total, torch.device("cpu")),
                group=group,
            )
            for stage in range(self.rank, total, choice.ranks)
        ]
        parameters = [parameter for stage in self.stages for parameter in stage.submod.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=1e-3)
        self.inputs = torch.ones(choice.microbatches, WIDTH)
        self.finish: Callable[[], None] = lambda: None

    def attach(self, plan: Plan) -> None:
        """Makes the plan's schedule and reductions."""
        self.schedule: Any = commlayer.pipeline.of_plan(plan, self.stages, mse_loss)
        if self.choice.replicas > 1:
            options = commlayer.pipeline.attach_options(plan)
            self.finish = commlayer.pipeline.attach(self.schedule, self.optimizer, self.dp_group, **options).finish

    def step(self) -> None:
        """One step of training."""
        given = (self.inputs,) if self.rank == 0 else ()
        target = {"target": self.inputs} if self.rank == self.choice.ranks - 1 else {}
        self.schedule.step(*given, **target, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(job: Log, content: Log) -> Log:
    """The log of one job on this rank: seconds of each step and the CPU's busy share, or measured costs."""
    plan = plan_of(job["plan"])
    if job["system"] == COSTS:  # each layer is a stage, and all ranks have speed 1
        measured = Job(plan, 1.0)
        measured.schedule = ScheduleLoopedBFS(list(measured.stages), plan.choice.microbatches, loss_fn=mse_loss)
        costs = measure(measured.schedule, measured.step, batches=3, optimizer=measured.optimizer)
        return {"step_s": [0.0], "busy": 0.0, "of_ranks": 0.0, "costs": dataclasses.asdict(costs)}
    running = Job(plan, content["speeds"][int(os.environ["RANK"])])
    running.attach(plan)
    log = turns.timed(running.step, WARM_UP, STEPS, trace=False)
    running.finish()
    dist.barrier()
    return log
