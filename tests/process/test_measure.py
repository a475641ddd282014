"""Costs of a pipeline that sleeps, measured between processes."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from commlayer.errors import ConfigError
from commlayer.frontend.pipelines.measure import Recorder, measure
from commlayer.planner.costs import Costs
from commlayer.scheduler.actions import COMPUTATIONS, Reduction, actions_of
from tests import ranks

WIDTH, MICROBATCHES, FORWARD_S = 8, 4, 0.02
TRIES = 5
"""Tries of a measurement: on a busy machine two steps may take very different times, and a sleep much longer."""


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.clone()  # zero-bubble schedules detach outputs, which views do not allow

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient.view_as(gradient), None


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seconds = seconds

    def forward(self, values: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(self.linear(values), self.seconds)  # type: ignore[no-untyped-call]
        return slept


class Job:
    """2 ranks of a pipeline; stage s sleeps (s + 1) times FORWARD_S."""

    def __init__(self, kind: Any, chunks: int, *, in_world: bool = False) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "pp"))
        self.rank, self.dp_group = mesh.get_local_rank("pp"), mesh.get_group("dp")
        group = None if in_world else mesh.get_group("pp")  # None: torch's default
        indices = [self.rank + 2 * k for k in range(chunks)]
        device = torch.device("cpu")
        self.stages = [PipelineStage(Block((i + 1) * FORWARD_S), i, 2 * chunks, device, group=group) for i in indices]
        given = self.stages[0] if kind is Schedule1F1B else self.stages
        self.schedule = kind(given, MICROBATCHES, loss_fn=lambda output, target: (output - target).square().mean())
        parameters = [parameter for stage in self.stages for parameter in stage.submod.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        self.inputs = torch.ones(2 * MICROBATCHES, WIDTH)

    def step(self) -> None:
        target = {"target": self.inputs} if self.rank == 1 else {}
        self.schedule.step(*((self.inputs,) if self.rank == 0 else ()), **target)
        self.optimizer.step()
        self.optimizer.zero_grad()


def check(costs: Costs, chunks: int) -> None:
    assert len(costs.layers) == 2 * chunks
    for index, layer in enumerate(costs.layers):
        forward_s = (index + 1) * FORWARD_S
        assert forward_s <= layer.forward_s < 1.5 * forward_s + FORWARD_S  # a busy machine wakes sleepers late
        assert 2 * forward_s <= layer.backward_s < 3 * forward_s + FORWARD_S
        assert layer.parameter_bytes == 4 * WIDTH * WIDTH
        assert layer.output_bytes == 2 * 4 * WIDTH  # a micro-batch has 2 rows
        assert layer.activation_bytes == 2 * 4 * WIDTH  # the input of the linear layer
    assert 0 <= costs.action_s < FORWARD_S
    assert 0 <= costs.link.latency_s < 0.1


def try_again(attempt: Callable[[], Callable[[], None]]) -> None:
    """Measures until all ranks judge well of it: `attempt` measures, and returns the judge."""
    for number in range(TRIES):
        judge, error = attempt(), None
        try:
            judge()
        except AssertionError as caught:
            error = caught
        failed = torch.tensor(float(error is not None))
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if not failed:
            return
        if number == TRIES - 1:
            raise error or AssertionError("another rank judged badly")


@ranks.on(4)
def test_costs_of_a_pipeline_with_replicas(rank: int, size: int) -> None:
    """All ranks have the same costs, and the model predicts the step that was measured, without reductions."""
    ranks.init(rank, size)
    job = Job(ScheduleLoopedBFS, 2)

    def attempt() -> Callable[[], None]:
        costs = measure(job.schedule, job.step, batches=2, dp_group=job.dp_group, optimizer=job.optimizer)
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, costs)
        start_s = time.monotonic()
        job.step()
        dist.barrier()
        step_s = time.monotonic() - start_s

        def judge() -> None:
            check(costs, 2)
            assert costs.link.rate_bps > 1e5
            assert all(layer.update_s > 0 for layer in costs.layers)
            assert everyones == [costs] * size
            predicted_s = costs.simulate(job.schedule, Reduction("step")).step_s
            assert predicted_s == pytest.approx(step_s, rel=0.5)

        return judge

    try_again(attempt)
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["commlayer", "gloo"])
@ranks.on(2)
def test_costs_of_one_pipeline(rank: int, size: int, backend: str) -> None:
    """Without replicas the rate is that of messages; any backend will do."""
    ranks.init(rank, size, backend)
    job = Job(Schedule1F1B, 1, in_world=backend == "gloo")

    def attempt() -> Callable[[], None]:
        costs = measure(job.schedule, job.step, batches=1)

        def judge() -> None:
            check(costs, 1)
            assert costs.link.rate_bps > 1e5
            assert all(layer.update_s == 0 for layer in costs.layers)

        return judge

    try_again(attempt)
    dist.destroy_process_group()


@ranks.on(2)
def test_a_recorder_has_every_action_and_leaves_the_stages_as_they_were(rank: int, size: int) -> None:
    ranks.init(rank, size)
    job = Job(ScheduleInterleavedZeroBubble, 2)

    def own(*args: Any, **kwargs: Any) -> Any:
        return type(stage).forward_one_chunk(stage, *args, **kwargs)

    stage = job.stages[0]
    stage.forward_one_chunk = own  # type: ignore[method-assign]
    recorder = Recorder(job.schedule)
    job.step()
    actions = {(a.kind, a.stage, a.microbatch) for a, _, _ in recorder.records}
    order = actions_of(job.schedule)[rank]
    assert actions == {(a.kind, a.stage, a.microbatch) for a in order if a.kind in COMPUTATIONS}
    assert {"F", "I", "W"} <= {kind for kind, _, _ in actions}
    recorder.remove()
    count = len(recorder.records)
    job.step()
    assert len(recorder.records) == count
    assert vars(stage)["forward_one_chunk"] is own
    assert "backward_one_chunk" not in vars(stage)
    assert "forward_one_chunk" not in vars(job.stages[1])
    dist.destroy_process_group()


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="list is no schedule"):
        measure([], lambda: None)
