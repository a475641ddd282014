"""Training of a small pipeline on a grid of 2 stages x 2 replicas, with torch's own reduction or through `attach`."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import StepLR

import commlayer
from commlayer.frontend.pipelines.pipeline import Pipeline
from tests.process import training_loop
from tests.process.training_loop import Make

STEPS, WIDTH, MICROBATCHES = 3, 12, 4

V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
HAS_V = not torch.__version__.startswith("2.11.")
"""Whether schedules in a V run on CPUs. Their start in torch 2.11 has a rank send to itself; gloo refuses that, too."""

OPTIMIZERS = training_loop.OPTIMIZERS | {
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.01, weight_decay=0.01)
}


@functools.cache
def mesh() -> DeviceMesh:
    """The mesh of this job: ranks 0 and 1 are a pipeline, 0 and 2 have the same stages."""
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

    `attached` False: gradients are averaged by an all-reduce of each, or as FSDP2 does by itself. `compiled` makes the
    module of a stage from a block.
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
        compiled: Callable[[Any], Any] | None = None,
        steps: int = STEPS,
        **options: Any,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage

        self.steps = steps
        """Length of a loop."""
        self.place, self.replica = rank % 2, rank // 2
        self.pp, self.dp = mesh().get_group("pp"), mesh().get_group("dp")
        self.numbers, total = stages_of(schedule, self.place)
        self.is_plain = not (sharded or shard)
        self.blocks = nn.ModuleList(Block(number, plain=self.is_plain) for number in self.numbers)
        if not self.is_plain:
            for block in self.blocks:
                (shard or fully_sharded)(block)  # type: ignore[arg-type]
        stages = [
            PipelineStage((compiled or eager)(block), number, total, torch.device("cpu"), group=self.pp)
            for number, block in zip(self.numbers, self.blocks, strict=True)
        ]
        self.has_last = total - 1 in self.numbers
        self.scale: Callable[[Tensor], Tensor] = lambda loss: loss
        """Changes each loss before its backward pass."""
        self.schedule = scheduled(schedule, stages, self.loss)
        self.optimizer = make(self.blocks.parameters())
        self.handle: Pipeline | None = None
        if attached:
            self.handle = commlayer.pipeline.attach(self.schedule, self.optimizer, self.dp, **options)
        self.seen: list[Tensor] = []
        """Everything to be compared."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale(nn.functional.mse_loss(output, target))

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

        def watching(stage: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any, **kwargs: Any) -> Any:
                result = forward(*args, **kwargs)
                left.append((stage.stage_index, len(set(steps._claims.values()))))
                return result

            return watched

        for stage in self.schedule._stages:
            stage.forward_one_chunk = watching(stage, stage.forward_one_chunk)
        return left

    def see_parameters(self) -> None:
        if self.handle is not None:
            self.handle.finish()
        for parameter in self.blocks.parameters():
            value: Any = parameter.detach()
            self.seen.append((value.full_tensor() if hasattr(value, "full_tensor") else value).clone())


def stages_of(schedule: str | int, place: int) -> tuple[list[int], int]:
    """The numbers of a rank's stages, and how many the pipeline has."""
    if schedule in ("GPipe", "1F1B"):
        return [place], 2
    if schedule in V_SCHEDULES:
        return [place, 3 - place], 4
    return [place, place + 2], 4


def runnable(schedules: Sequence[Any]) -> list[Any]:
    """The schedules that this torch runs on CPUs."""
    return [schedule for schedule in schedules if HAS_V or schedule not in V_SCHEDULES]


def scheduled(schedule: str | int, stages: Sequence[Any], loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class

    if isinstance(schedule, int):
        return commlayer.pipeline.schedule(stages, MICROBATCHES, schedule, loss_fn=loss)
    given: Any = stages[0] if len(stages) == 1 else stages
    return get_schedule_class(schedule)(given, MICROBATCHES, loss_fn=loss)


def eager(block: Any) -> Any:
    """The block as it is."""
    return block


def compiled_in_place(block: Block) -> Block:
    """The block, which torch.compile runs."""
    block.compile(backend="eager")
    return block


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
        check_same(plain, ours, schedule, loop.__name__, mode)
        ours.handle.remove()


def check_same(plain: Training, ours: Training, *case: Any) -> None:
    """Fails, with the case, unless both saw the same."""
    assert len(plain.seen) == len(ours.seen), case
    for number, (one, other) in enumerate(zip(plain.seen, ours.seen, strict=True)):
        assert torch.equal(one, other), (*case, number)


def compare_late(
    rank: int, loop: Loop, schedule: str | int, make: Make = OPTIMIZERS["SGD"], *, steps: int = 5, **stages: Any
) -> None:
    """Runs the loop with the rule of `staleness=1` written out, and with `staleness=1`."""
    plain = Training(rank, schedule, make, attached=False, steps=steps, **stages)
    _make_late(plain)
    ours = Training(rank, schedule, make, steps=steps, staleness=1, **stages)
    for trainer in (plain, ours):
        loop(trainer)
        trainer.see_parameters()
    check_same(plain, ours, schedule, loop.__name__)


def _make_late(training: Training) -> None:
    """Makes `step()` use the gradients of the step before: W(t+1) = W(t) - lr g(W(t-1))."""
    parameters, own = list(training.blocks.parameters()), training.optimizer.step
    late: list[Any] = []

    def step(_: Any) -> None:
        now = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        for parameter, gradient in zip(parameters, late, strict=False):
            parameter.grad = gradient
        if late:
            own()
        late[:] = now

    made: Any = types.MethodType(step, training.optimizer)
    training.optimizer.step = made  # type: ignore[method-assign]


def usual(training: Training) -> None:
    scheduler = StepLR(training.optimizer, 1, 0.8)
    for step in range(training.steps):
        training.run(step)
        training.optimizer.step()
        scheduler.step()
        training.optimizer.zero_grad()


def zeroing(training: Training) -> None:
    for step in range(training.steps):
        training.optimizer.zero_grad(set_to_none=False)
        training.run(step)
        training.optimizer.step()


def never_zeroing(training: Training) -> None:
    for step in range(training.steps):
        training.run(step)
        training.optimizer.step()


def accumulating(training: Training) -> None:
    for step in range(training.steps):
        training.run(10 * step)
        training.run(10 * step + 1)
        training.optimizer.step()
        training.optimizer.zero_grad()


def clip(training: Training) -> None:
    """Clips gradients by the global norm: that of the parameters of all stages, also those of other ranks."""
    parameters = list(training.blocks.parameters())
    norm: Any = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    square = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).double() ** 2
    dist.all_reduce(square, group=training.pp)
    training.seen.append(square)
    nn.utils.clip_grads_with_norm_(parameters, 0.01, square.sqrt().float())


def clipping(training: Training) -> None:
    for step in range(training.steps):
        training.run(step)
        clip(training)
        training.optimizer.step()
        training.optimizer.zero_grad()


OVERFLOW = 1
"""The step in which `Scaled` makes the losses of one replica infinite."""


class Scaled:
    """Gradients that a GradScaler has scaled. All ranks of a pipeline skip the step in which one finds an overflow."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.scaler.scale(torch.zeros(()))  # makes the scale, on ranks without a loss

    def run(self, step: int) -> bool:
        """One step of the schedule; unscales the gradients. Whether the optimizer is to make its step."""
        training, optimizer = self.training, self.training.optimizer
        factor = float("inf") if step == OVERFLOW and training.replica == 0 else 1.0
        training.scale = lambda loss: self.scaler.scale(loss) * factor
        with torch.autocast("cpu", dtype=torch.bfloat16):
            training.run(step)
        self.scaler.unscale_(optimizer)
        # GradScaler knows nothing of other ranks.
        (found,) = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=training.pp)
        training.seen.append(torch.tensor([found.item(), self.scaler.get_scale()]))
        assert bool(found) == (step == OVERFLOW)
        return not found

    def step(self) -> None:
        """The optimizer's step, unless there was an overflow."""
        self.scaler.step(self.training.optimizer)
        self.scaler.update()


def scaling(training: Training) -> None:
    scaled = Scaled(training)
    for step in range(training.steps + 1):
        if scaled.run(step):
            clip(training)
        scaled.step()
        training.optimizer.zero_grad()
    training.scale = lambda loss: loss  # the next training in this process has a scaler of its own


def skipping(training: Training) -> None:
    """Steps that are left out, as after an overflow."""
    for step in range(training.steps):
        training.run(step)
        if step != 1:
            training.optimizer.step()
        training.optimizer.zero_grad()


def evaluating(training: Training) -> None:
    for step in range(training.steps):
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
    training.blocks[0].load_state_dict(
        {name[2:]: tensor for name, tensor in copied[0].items() if name.startswith("0.")}
    )
    training.optimizer.load_state_dict(copied[1])
    training.optimizer.zero_grad()
    training.run(3)
    training.optimizer.step()


LOOPS = [zeroing, never_zeroing, accumulating, clipping, scaling, skipping, evaluating, restoring]
