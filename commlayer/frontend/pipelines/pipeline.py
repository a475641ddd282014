"""`commlayer.pipeline`: gradients of pipeline stages travel while other stages compute.

    schedule = ScheduleLoopedBFS(stages, n_microbatches=16, loss_fn=loss_fn)
    handle = commlayer.pipeline.attach(schedule, optimizer, dp_group)
    ...                                                              # the training loop is unchanged

A stage's gradients are complete after its last backward pass. There the schedule calls `stage.perform_reduce_grad`,
which now starts the reduction of the whole stage in one operation (scheduler/segment.py) and does not wait for it.

- `defer=False`: `optimizer.step()` waits, or whatever reads a gradient before (scheduler/deferred.py).
- `defer=True`: the step of a stage's parameters is made before the next forward pass of this stage
  (scheduler/deferred.py). The stage that is needed first has the most urgent class.

Messages between stages, and all else that the schedule sends, have class 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...compress.optimizer import check_optimizer
from ...config import Config, Policy
from ...dynamo import untraced
from ...errors import ConfigError
from ...scheduler.actions import Action, actions_of
from ...scheduler.deferred import AwaitedStep, DeferredStep, check_per_parameter
from ...scheduler.order import stage_class
from ..gradients.ddp import reduce_buffer
from ..gradients.disabled import refuse
from ..gradients.fsdp import sharded_modules
from ..gradients.gradient import Place
from ..gradients.hook_state import HookState
from ..gradients.started import Memories, Started
from ..overlap.fsdp import parameter_groups
from ..overlap.handle import check_own_steps, hooks_of_states
from ..overlap.overlap import check_staleness, check_stateless
from ..work.context import priority
from .fsdp import FsdpStage
from .hand_over import URGENT
from .measure import measure as measure
from .measure import stages_of
from .planned import attach_options as attach_options
from .planned import of_plan as of_plan
from .replaced import Replaced
from .schedule import schedule as schedule
from .slices import passes_of
from .slices import slices as slices
from .stage import PlainStage

__all__ = ["Pipeline", "attach", "attach_options", "measure", "of_plan", "schedule", "slices"]

WHO = "pipeline.attach"


def attach(
    schedule: Any,
    optimizer: Optimizer | list[Optimizer] | tuple[Optimizer, ...],
    dp_group: dist.ProcessGroup,
    *,
    defer: bool = True,
    staleness: int = 0,
    policy: Policy | None = None,
    state: HookState | None = None,
    by_next_use: bool = True,
) -> Pipeline:
    """Averages the gradients of a schedule's stages over `dp_group`. All ranks call it, before the first step.

    `schedule` is one of torch.distributed.pipelining, with any number of stages on this rank. `optimizer` has their
    parameters; several optimizers may each have those of some stages. `dp_group` has the ranks with the same stages, on
    any backend. The training loop stays as it is, and with `staleness` 0 so do its results, bit by bit.

    `defer`: steps are made before the next forward pass of a stage instead of in `optimizer.step()`. `staleness=1`
    makes each step with the gradients of the step before, W(t+1) = W(t) - lr g(W(t-1)), see `overlap`. `state` is a
    HookState of the caller instead of `policy`: restored, or with a tolerance. `by_next_use=False` gives all gradients
    the policy's class (for measurements).

    Code that reads parameters before their steps are made makes them. Code in C++ that does so (a transform of
    torch.func, an extension) must call `finish()` of the handle first.

    Raises ConfigError for schedules, stages, optimizers and policies with which results would change, and with
    COMMLAYER_DISABLE.
    """
    if Config.is_disabled():
        refuse(WHO, "nothing would average the gradients of the stages; leave the call out and average them yourself")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    check_staleness(staleness, WHO)
    if staleness and not defer:
        raise ConfigError(f"{WHO}(defer=False, staleness=1): a late step is a deferred one; use defer=True")
    for single in optimizers:
        if defer or not isinstance(single, Optimizer):
            check_per_parameter(single, WHO)
    if not isinstance(dp_group, dist.ProcessGroup):
        raise ConfigError(f"{WHO}(dp_group={dp_group!r}): give a process group, as mesh.get_group('dp')")
    if state is not None and policy is not None:
        raise ConfigError(f"{WHO}(policy=..., state=...): the state has a policy; give one of both")
    stages = _stages_of(schedule)
    for stage in stages:
        _check_stage(stage)
        if sharded_modules(stage.submod):
            _check_sharded(stage, dp_group, policy)
            if state is not None:
                raise ConfigError(f"{WHO}(state=...): FSDP2 has no place for its residuals; give a policy")
    _check_shared(stages)
    owners = [_owner(stage, optimizers) for stage in stages]
    state = state or HookState(policy, dp_group, optimizer=optimizers[0])
    state.use_group(dp_group, WHO)
    state.optimizer = state.optimizer or optimizers[0]
    for single in optimizers:
        check_optimizer(state.policy, single)
    if staleness:
        check_stateless(state, WHO)
        state.check_policy = functools.partial(check_stateless, state, WHO)
    steps: list[DeferredStep | AwaitedStep] = []
    try:
        for single in optimizers:
            steps.append(DeferredStep(single, staleness) if defer else AwaitedStep(single))  # noqa: PERF401  # removed below
        own = [(stage, steps[owner]) for stage, owner in zip(stages, owners, strict=True)]
        # With staleness 1, gradients of the step before are still in flight and needed earlier: first in, first out.
        by_next_use = by_next_use and defer and not staleness
        return Pipeline(schedule, own, state, policy, by_next_use=by_next_use)
    except BaseException:
        for made in steps:
            made.remove()
        raise


@untraced
class Pipeline:
    """What `attach` returns."""

    def __init__(
        self,
        schedule: Any,
        stages: Sequence[tuple[Any, DeferredStep | AwaitedStep]],
        state: HookState,
        policy: Policy | None,
        *,
        by_next_use: bool,
    ) -> None:
        state.group()  # a collective: made here, where all ranks are
        self.state = state
        """Counters, checkpoint and `loss_scale` of the reductions."""
        self._schedule = schedule
        self._steps = list(dict.fromkeys(steps for _, steps in stages))
        self._buckets = 0
        """Reductions that this step of the schedule has started."""
        self._memories: Memories | None = ({}, {}) if self._steps[0].staleness else None
        self._forwards = 0
        """Forward passes that this step of the schedule has started."""
        self._ahead: dict[int, FsdpStage] = {}
        """Stages whose weights are gathered when this many forward passes have started."""
        # Raises ConfigError before anything is replaced.
        actions = actions_of(schedule)[stages[0][0].group_rank] if len(stages) > 1 else []
        self._parts = self._parts_of(stages, policy)
        self._set_order(actions, by_next_use=by_next_use)
        self._replaced = Replaced()
        for part in self._parts:
            self._replaced.put(part.stage, "perform_reduce_grad", part.reduce)
            self._replaced.put(part.stage, "forward_one_chunk", self._forwarding(part))
        self._replaced.put(schedule, "step", self._stepping(schedule.step))
        self._hooks = [
            part.stage.submod.register_forward_pre_hook(lambda *_, part=part: part.enter(), prepend=True)
            for part in self._parts
        ]
        modules = [module for stage, _ in stages for module in stage.submod.modules()]
        for number, step in enumerate(self._steps):
            self._hooks += hooks_of_states(() if number else modules, step.optimizer, self.finish, self._load)

    def finish(self) -> None:
        """Waits for all gradients, and makes all steps that are left; for code that then reads parameters or `state`.

        Raises the error of an operation: PeerLostError, OperationTimeoutError and the others.
        """
        for step in self._steps:
            step.drain()
        self.state.in_flight.drain()

    def remove(self) -> None:
        """Ends it after `finish`: from then on nothing averages the gradients of plain stages.

        After an error of `finish`, the steps that are left are dropped: ranks may differ, so restore a checkpoint.
        """
        try:
            self.finish()
        finally:
            self._replaced.restore()
            for hook in self._hooks:
                hook.remove()
            for part in self._parts:
                part.remove()
            for step in self._steps:
                step.remove()
            self._hooks, self._parts = [], []

    def _parts_of(
        self, stages: Sequence[tuple[Any, DeferredStep | AwaitedStep]], policy: Policy | None
    ) -> list[PlainStage | FsdpStage]:
        early = None if hasattr(self._schedule, "_stages") else _factor(self._schedule)
        passes = passes_of(self._schedule)
        parts: list[PlainStage | FsdpStage] = []
        number = 0
        for stage, steps in stages:
            modules = len(sharded_modules(stage.submod))
            if modules:
                parts.append(FsdpStage(stage, steps, policy, WHO, number))
            else:
                parts.append(PlainStage(stage, steps, self._reduce, self._agree, early=early, passes=passes))
            number += modules
        return parts

    def _load(self) -> None:
        """A checkpoint is about to be loaded."""
        self.finish()
        for step in self._steps:
            step.forget()

    def _set_order(self, actions: list[Action], *, by_next_use: bool) -> None:
        """Classes by the order of first forwards, and which stage reduces last: the same on all ranks of the group."""
        if len(self._parts) == 1:
            self._parts[0].priority, self._parts[0].is_last = self.state.policy.priority, True
            return
        parts = {part.stage.stage_index: part for part in self._parts}
        first = list(dict.fromkeys(action.stage for action in actions if action.kind == "F"))
        last = {action.stage: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
        base = self.state.policy.priority
        for place, index in enumerate(first):
            parts[index].priority = stage_class(base, place, len(first)) if by_next_use else base
            parts[index].place = 1 + place if by_next_use else 0
        buckets = [index for index in last if parts[index].has_buckets]
        if buckets:
            parts[max(buckets, key=last.__getitem__)].is_last = True
        forwards = [action.stage for action in actions if action.kind == "F"]
        for before, index in pairwise(first):
            part = parts[index]
            if isinstance(part, FsdpStage):  # half-way: late for its gradients, early for its weights
                self._ahead[(forwards.index(before) + forwards.index(index)) // 2] = part

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`schedule.step`, whose messages are urgent."""

        def stepping(*args: Any, **kwargs: Any) -> Any:
            self._buckets = self._forwards = 0
            for part in self._parts:
                part.begin()
            with priority(URGENT):
                result = step(*args, **kwargs)
            for part in self._parts:
                part.end()
            return result

        return stepping

    def _forwarding(self, part: PlainStage | FsdpStage) -> Callable[..., Any]:
        """The stage's `forward_one_chunk`, after the steps of its parameters: torch would hide the type of an error in
        the forward pass of the module."""
        forward = part.stage.forward_one_chunk

        def forwarding(*args: Any, **kwargs: Any) -> Any:
            part.enter()
            ahead = self._ahead.get(self._forwards)
            self._forwards += 1
            if ahead is not None:
                ahead.gather()
            return forward(*args, **kwargs)

        return forwarding

    def _reduce(self, parameters: list[Tensor], is_last: bool, buffer: Tensor, class_: int) -> Callable[[], None]:
        """Starts the average of a segment's gradients; returns the function that waits for it."""
        place = Place(self._buckets, is_last=is_last, priority=class_)
        self._buckets += 1
        started = Started(buffer)
        started.averaged = reduce_buffer(
            buffer,
            parameters,
            self.state,
            lambda: started.reduction(self.state, self._memories),
            place,
            running=self._steps[0].staleness,
        )
        return started.wait

    def _agree(self, flags: list[bool]) -> list[bool]:
        """The flags that are set on any rank."""
        return [bool(value) for value in self.state.largest_of(flags)]


def _stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank. Raises ConfigError for what is no schedule."""
    stages = stages_of(schedule)
    if any("perform_reduce_grad" in vars(stage) for stage in stages):
        raise ConfigError(
            f"{WHO}({type(schedule).__name__}): its stages have a perform_reduce_grad of their own, as after another "
            f"attach(); call remove() of its handle first"
        )
    custom = getattr(schedule, "_comp_type_to_function_map", {})
    if any(getattr(kind, "value", None) == "REDUCE_GRAD" for kind in custom):
        raise ConfigError(
            f"{WHO}({type(schedule).__name__}): it has a custom function for REDUCE_GRAD, which would reduce gradients "
            f"a second time; leave register_custom_function(REDUCE_GRAD, ...) out"
        )
    return stages


def _check_stage(stage: Any) -> None:
    """Raises ConfigError for stages that reduce gradients by themselves, or whose gradients fit no buffer."""
    who, module = f"{WHO}: stage {stage.stage_index}", stage.submod
    check_own_steps(module, who)
    if isinstance(module, DistributedDataParallel):
        raise ConfigError(f"{who} is a DistributedDataParallel, which reduces by itself; give the stage its module")
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "placements") and not sharded_modules(module):
            raise ConfigError(f"{who}: parameter {name!r} is a DTensor; use fully_shard for the stage, or leave it out")
    for name, submodule in module.named_modules():
        if getattr(submodule, "sparse", False) is True:
            raise ConfigError(f"{who}: module {name!r} has sparse gradients; use sparse=False")


def _check_sharded(stage: Any, dp_group: dist.ProcessGroup, policy: Policy | None) -> None:
    """Raises ConfigError for a stage of FSDP2 with another group, or whose gradients are not sharded."""
    who = f"{WHO}: stage {stage.stage_index}"
    if type(stage.submod).__name__ == "OptimizedModule":
        raise ConfigError(
            f"{who} is the result of torch.compile(module), and torch.distributed.pipelining does not see that FSDP2 "
            f"shards it; use module.compile()"
        )
    if any(base.__name__ == "ReplicateModule" for base in type(stage.submod).__mro__):
        raise ConfigError(f"{who} is given to replicate(), which reduces by itself; leave replicate() out")
    if stage.submod not in sharded_modules(stage.submod):
        raise ConfigError(f"{who}: fully_shard was called only for modules in it; call it for the stage's module, too")
    groups = parameter_groups(stage.submod, policy, WHO).values()
    for group in groups:
        mesh = getattr(group.mesh_info, "shard_process_group", None)
        has_replicas = hasattr(group.mesh_info, "replicate_process_group") or group._all_reduce_hook is not None
        members, given = (dist.get_process_group_ranks(members_of) for members_of in (mesh or dp_group, dp_group))
        if not set(members) <= set(given) or (len(members) < len(given) and not has_replicas):
            raise ConfigError(f"{who} is sharded over ranks {members}, and dp_group has {given}; give the mesh's group")
    of_groups = [parameter for group in groups for parameter in group.fsdp_params]
    sharded = {
        getattr(parameter, name, None) for parameter in of_groups for name in ("sharded_param", "_unsharded_param")
    }
    for name, parameter in stage.submod.named_parameters():
        if parameter.requires_grad and parameter not in sharded:
            raise ConfigError(
                f"{who}: parameter {name!r} is in ignored_params of fully_shard, so nothing averages its gradient; "
                f"leave ignored_params out, or freeze it with requires_grad_(False)"
            )


def _check_shared(stages: Sequence[Any]) -> None:
    """Raises ConfigError for a parameter of two stages: its gradient has a place in one buffer."""
    owner: dict[Tensor, int] = {}
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            if owner.setdefault(parameter, stage.stage_index) != stage.stage_index:
                raise ConfigError(
                    f"{WHO}: stages {owner[parameter]} and {stage.stage_index} share parameter {name!r}, and each "
                    f"reduces its own gradients; give each stage its own parameter"
                )


def _owner(stage: Any, optimizers: Sequence[Optimizer]) -> int:
    """The number of the optimizer that has the stage's parameters. Raises ConfigError if several have some."""
    mine = set(stage.submod.parameters())
    having = [
        number
        for number, single in enumerate(optimizers)
        if any(parameter in mine for group in single.param_groups for parameter in group["params"])
    ]
    if len(having) > 1:
        raise ConfigError(f"{WHO}: {len(having)} optimizers have parameters of stage {stage.stage_index}; use one")
    return having[0] if having else 0


def _factor(schedule: Any) -> int:
    """The divisor that a schedule with one stage gives to `perform_reduce_grad`."""
    return int(schedule._n_microbatches) if schedule.scale_grads else 1
