"""What a pipeline keeps from step to step: counts of gradients, frozen parameters, errors of reductions."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import commlayer
from commlayer.frontend.device.in_flight import Step
from commlayer.frontend.pipelines.pipeline import Pipeline
from tests import ranks

WIDTH, MICROBATCHES = 6, 4
ALL = [True] * MICROBATCHES


class Experts(nn.Module):
    """Its first layer has a gradient only for micro-batches whose first value is positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.expert, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        hidden = torch.tanh(self.expert(values)) if values[0, 0] > 0 else values
        return self.outer(hidden)  # type: ignore[no-any-return]


@functools.cache
def mesh() -> DeviceMesh:
    """Each of two ranks is a pipeline."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))


class Solo:
    """A pipeline of one rank and two replicas. `attached` False: gradients are averaged by an all-reduce of each."""

    def __init__(self, rank: int, *, attached: bool) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.rank, self.dp = rank, mesh().get_group("dp")
        self.experts = Experts()
        stage = PipelineStage(self.experts, 0, 1, torch.device("cpu"), group=mesh().get_group("pp"))
        self.schedule: Any = Schedule1F1B(stage, MICROBATCHES, loss_fn=self.loss)
        self.optimizer = torch.optim.AdamW(self.experts.parameters(), lr=0.01)
        self.handle: Pipeline | None = None
        if attached:
            self.attach()
        self.losses_left = -1
        """Losses until one fails; negative: none does."""

    def attach(self) -> Pipeline:
        self.handle = commlayer.pipeline.attach(self.schedule, self.optimizer, self.dp)
        return self.handle

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.losses_left == 0:
            raise ValueError("a bad batch")
        self.losses_left -= 1
        return nn.functional.mse_loss(output, target)

    def run(self, step: int, uses: Sequence[bool] = ALL) -> None:
        """One step of the schedule. `uses`: whether a micro-batch uses the expert."""
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        inputs, targets = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator)
        for part, is_used in zip(inputs.chunk(MICROBATCHES), uses, strict=True):
            part[0, 0] = 1.0 if is_used else -1.0
        self.schedule.step(inputs, target=targets)
        if self.handle is None:
            for parameter in self.experts.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=self.dp)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        if self.handle is not None:
            self.handle.finish()
        return [parameter.detach().clone() for parameter in self.experts.parameters()]


def compare(rank: int, loop: Callable[[Solo], None]) -> None:
    """Runs the loop without commlayer and with it."""
    seen = []
    for attached in (False, True):
        training = Solo(rank, attached=attached)
        loop(training)
        seen.append(training.parameters())
    assert all(map(torch.equal, *seen))


@ranks.on(2, ranks.run_job)
def test_a_parameter_may_have_more_gradients_than_in_the_step_before(rank: int, size: int) -> None:
    def loop(training: Solo) -> None:
        for step, uses in enumerate([ALL, ALL, [False, True, True, True], ALL, [True, False, False, False], ALL, ALL]):
            training.run(step, uses)
            training.step()

    compare(rank, loop)


@ranks.on(2, ranks.run_job)
def test_counts_of_a_step_that_failed_are_dropped(rank: int, size: int) -> None:
    def loop(training: Solo) -> None:
        for step in range(3):
            training.run(step)
            training.step()
        training.losses_left = 2
        with pytest.raises(ValueError, match="a bad batch"):
            training.run(3)
        training.losses_left = -1
        training.schedule._internal_losses.clear()  # torch does not
        training.optimizer.zero_grad()
        for step in range(4, 7):
            training.run(step)
            training.step()

    compare(rank, loop)


@ranks.on(2, ranks.run_job)
def test_a_parameter_that_is_frozen_while_attached_is_an_error(rank: int, size: int) -> None:
    training = Solo(rank, attached=True)
    assert training.handle is not None
    for step in range(2):
        training.run(step)
        training.step()
    training.handle.finish()
    frozen, outer = training.experts.expert.weight, training.experts.outer.weight
    before = [frozen.detach().clone(), outer.detach().clone()]
    frozen.requires_grad_(False)
    with pytest.raises(commlayer.ConfigError, match=r"'expert.weight' of stage 0 was frozen after the first step"):
        training.run(2)
    training.optimizer.zero_grad()
    training.handle.remove()
    training.attach()
    for step in range(2, 4):
        training.run(step)
        training.step()
    training.handle.finish()
    assert torch.equal(frozen, before[0])
    assert not torch.equal(outer, before[1])


class Failed:
    """A reduction on a device."""

    def outcome(self) -> BaseException:
        return commlayer.PeerLostError("rank 1 of 2 is lost")


@ranks.on(2, ranks.run_job)
def test_finish_raises_the_errors_of_a_device(rank: int, size: int) -> None:
    training = Solo(rank, attached=True)
    assert training.handle is not None
    failed: Any = Failed()
    training.handle.state.in_flight._steps.append(Step([failed], is_whole=True))
    with pytest.raises(commlayer.PeerLostError, match="rank 1 of 2 is lost"):
        training.handle.finish()
