"""Training of a small pipeline on a grid of 2 stages x 2 replicas, with torch's own reduction or through `attach`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import StepLR

import commlayer
from commlayer.frontend.pipeline import Pipeline
from tests.process import training_loop
from tests.process.training_loop import Make

STEPS, WIDTH, MICROBATCHES = 3, 12, 4

OPTIMIZERS = training_loop.OPTIMIZERS | {
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.01, weight_decay=0.01)
}


@functools.cache
def mesh() -> DeviceMesh:
    """Of this job: ranks 0 and 1 are a pipeline, 0 and 2 have the same stages."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


class Block(nn.Module):
    """A stage. A plain one also has a parameter of another dtype, one that is not used, and a frozen one."""

    def __init__(self, number: int, *, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(100 + number)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64 if plain else torch.float32))
        if plain:
            self.unused = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        changed: Tensor = self.outer(torch.tanh(self.inner(values)))
        return values + changed * self.gain.float()


class Training:
    """One training. Its stages are plain, or given to `fully_shard`; `group` is that of `commlayer.pipeline.schedule`.

    `attached` False: gradients are averaged by an all-reduce of each, or as FSDP2 does by itself.
    """

    def __init__(
        self,
        rank: int,
        schedule: str | int,
        make: Make = OPTIMIZERS["AdamW"],
        *,
        attached: bool = True,
        sharded: bool = False,
        shard: Callable[[Block], None] | None = None,
        **options: Any,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage

        self.place, self.replica = rank % 2, rank // 2
        self.pp, self.dp = mesh().get_group("pp"), mesh().get_group("dp")
        self.numbers, total = stages_of(schedule, self.place)
        self.is_plain = not (sharded or shard)
        self.blocks = nn.ModuleList(Block(number, plain=self.is_plain) for number in self.numbers)
        if not self.is_plain:
            for block in self.blocks:
                (shard or fully_sharded)(block)  # type: ignore[arg-type]
        stages = [
            PipelineStage(block, number, total, torch.device("cpu"), group=self.pp)
            for number, block in zip(self.numbers, self.blocks, strict=True)
        ]
        self.has_last = total - 1 in self.numbers
        self.schedule = scheduled(schedule, stages)
        self.optimizer = make(self.blocks.parameters())
        self.handle: Pipeline | None = None
        if attached:
            self.handle = commlayer.pipeline.attach(self.schedule, self.optimizer, self.dp, **options)
        self.seen: list[Tensor] = []
        """Everything to be compared."""

    def run(self, step: int, *, evaluates: bool = False) -> None:
        """One step of the schedule."""
        generator = torch.Generator().manual_seed(10 * step + self.replica)
        inputs, targets = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator)
        losses: list[Tensor] = []
        given: Any = {"target": targets, "losses": losses} if self.has_last else {}
        method = self.schedule.eval if evaluates else self.schedule.step
        method(*([inputs] if 0 in self.numbers else []), **given)
        self.seen += [loss.detach().clone() for loss in losses]
        if self.handle is None and self.is_plain and not evaluates:
            for parameter in self.blocks.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=self.dp)

    def watch(self) -> list[tuple[int, int]]:
        """A list that gets, at the end of each forward pass, the number of the stage and of the steps still to make."""
        assert self.handle is not None
        steps: Any = self.handle._steps[0]
        left: list[tuple[int, int]] = []
        for number, block in zip(self.numbers, self.blocks, strict=True):
            block.register_forward_hook(
                lambda *_, number=number: left.append((number, len(set(steps._claims.values()))))
            )
        return left

    def see_parameters(self) -> None:
        if self.handle is not None:
            self.handle.finish()
        for each in self.blocks.parameters():
            value: Any = each.detach()
            self.seen.append((value.full_tensor() if hasattr(value, "full_tensor") else value).clone())


def stages_of(schedule: str | int, place: int) -> tuple[list[int], int]:
    """The numbers of a rank's stages, and how many the pipeline has."""
    if schedule in ("GPipe", "1F1B"):
        return [place], 2
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [place, 3 - place], 4
    return [place, place + 2], 4


def scheduled(schedule: str | int, stages: Sequence[Any]) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class

    if isinstance(schedule, int):
        return commlayer.pipeline.schedule(stages, MICROBATCHES, schedule, loss_fn=nn.functional.mse_loss)
    given: Any = stages[0] if len(stages) == 1 else stages
    return get_schedule_class(schedule)(given, MICROBATCHES, loss_fn=nn.functional.mse_loss)


def fully_sharded(block: Block) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in (block.inner, block.outer, block):
        fully_shard(module, mesh=mesh()["dp"], reshard_after_forward=False)


Loop = Callable[[Training], None]
MODES: list[dict[str, Any]] = [{"defer": False}, {"defer": True}]


def compare(
    rank: int,
    loop: Loop,
    schedule: str | int,
    make: Make = OPTIMIZERS["AdamW"],
    modes: Sequence[dict[str, Any]] = MODES,
    **stages: Any,
) -> None:
    """Runs the loop without commlayer and in each mode."""
    plain = Training(rank, schedule, make, attached=False, **stages)
    loop(plain)
    plain.see_parameters()
    assert len(plain.seen) >= len(list(plain.blocks.parameters()))
    for mode in modes:
        ours = Training(rank, schedule, make, **stages, **mode)
        assert ours.handle is not None
        loop(ours)
        ours.see_parameters()
        assert len(plain.seen) == len(ours.seen)
        for number, (one, other) in enumerate(zip(plain.seen, ours.seen, strict=True)):
            assert torch.equal(one, other), (schedule, loop.__name__, mode, number)
        ours.handle.remove()


def usual(training: Training) -> None:
    scheduler = StepLR(training.optimizer, 1, 0.8)
    for step in range(STEPS):
        training.run(step)
        training.optimizer.step()
        scheduler.step()
        training.optimizer.zero_grad()


def zeroing(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad(set_to_none=False)
        training.run(step)
        training.optimizer.step()


def never_zeroing(training: Training) -> None:
    for step in range(STEPS):
        training.run(step)
        training.optimizer.step()


def accumulating(training: Training) -> None:
    for step in range(STEPS):
        training.run(10 * step)
        training.run(10 * step + 1)
        training.optimizer.step()
        training.optimizer.zero_grad()


def clipping(training: Training) -> None:
    for step in range(STEPS):
        training.run(step)
        norm: Any = nn.utils.clip_grad_norm_(training.blocks.parameters(), 0.01)
        training.seen.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).clone())
        training.optimizer.step()
        training.optimizer.zero_grad()


def skipping(training: Training) -> None:
    """Steps that are left out, as after an overflow."""
    for step in range(STEPS):
        training.run(step)
        if step != 1:
            training.optimizer.step()
        training.optimizer.zero_grad()


def evaluating(training: Training) -> None:
    for step in range(STEPS):
        training.run(step)
        training.optimizer.step()
        training.optimizer.zero_grad()
        with torch.no_grad():
            training.run(step + 100, evaluates=True)


def restoring(training: Training) -> None:
    """A checkpoint in the middle, to which the training goes back."""
    for step in range(2):
        training.run(step)
        training.optimizer.step()
        training.optimizer.zero_grad()
    copied: Any = torch.utils._pytree.tree_map_only(
        Tensor, lambda each: each.detach().clone(), (training.blocks.state_dict(), training.optimizer.state_dict())
    )
    training.run(2)
    training.optimizer.step()
    training.blocks[0].load_state_dict({name[2:]: each for name, each in copied[0].items() if name.startswith("0.")})
    training.optimizer.load_state_dict(copied[1])
    training.optimizer.zero_grad()
    training.run(3)
    training.optimizer.step()


LOOPS = [zeroing, never_zeroing, accumulating, clipping, skipping, evaluating, restoring]
