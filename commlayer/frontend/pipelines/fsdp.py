"""`FsdpStage`: the gradients of a pipeline stage that FSDP2 shards.

`stage.perform_reduce_grad` starts a reduce-scatter for each sharded module, and takes views of the outputs. Nothing
reads these before the step, so the wait and the division come later. Since torch 2.15 it is `start_gradient_reduction`
and `wait_for_gradient_reduction`, which most schedules call by themselves. A schedule gathers the weights of stages
ahead of time; with deferred steps a stage's weights are gathered once its steps are made, in the same order on all
ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Work

from ...config import Policy
from ...dynamo import untraced
from ...scheduler.deferred import AwaitedStep, DeferredStep
from ...scheduler.gradient import PendingGradient, PendingReduction
from ..overlap.fsdp import DeferredReduceScatter, defer_collectives, must_wait, parameter_groups
from ..work.context import in_order, labelled
from .replaced import Replaced
from .stage import AttachedStage


@untraced
class FsdpStage(AttachedStage):
    """One stage. `policy` None: that of `compress_fsdp`, or the default. `first`: number of its first collective."""

    has_buckets = False
    """Whether a HookState has its gradients."""

    def __init__(
        self, stage: Any, steps: DeferredStep | AwaitedStep, policy: Policy | None, who: str, first: int
    ) -> None:
        super().__init__(stage, steps)
        groups = parameter_groups(stage.submod, policy, who)
        self.parameters: list[Tensor] = [
            parameter.sharded_param for group in groups.values() for parameter in group.fsdp_params
        ]
        self._reduce_grad = stage.perform_reduce_grad
        self._wait_reduction = getattr(stage, "wait_for_gradient_reduction", None)  # since torch 2.15
        self._started: list[tuple[list[Tensor], Work, Tensor]] = []
        self._told: set[str] = set()
        self.is_removed = False
        """Whether `remove` has been called."""
        self._has_entered = True
        """Whether its weights of this step may be gathered."""
        self._gathers: list[_Gather] = []
        defer_collectives(groups, policy, self, first)
        self._replaced = Replaced()
        if self._wait_reduction is not None:
            self._replaced.put(stage, "wait_for_gradient_reduction", self.wait_reduction)
        for module in groups if isinstance(steps, DeferredStep) else ():
            self._replaced.put(module, "unshard", functools.partial(self._unshard, module.unshard))

    def begin(self) -> None:
        """A step of the schedule starts."""
        self._started.clear()  # not empty after a step that failed
        self._gathers.clear()
        self._has_entered = False

    def end(self) -> None:
        """A step of the schedule has ended."""
        self._has_entered = True

    def enter(self) -> None:
        """Makes the steps of the parameters before a forward pass. Raises the error of a reduction."""
        if not self._has_entered:
            self.gather()
        self.steps.use(self.parameters)

    def gather(self) -> None:
        """Makes the steps of its parameters, and starts to gather the weights that the schedule has asked for."""
        self.steps.use(self.parameters)
        for parameter in self.parameters if self.stage.has_backward else ():
            if isinstance(parameter.grad, PendingGradient):  # no step() has taken it, and FSDP2 adds to it
                parameter.grad.reduction.wait()
        self._has_entered = True
        gathers, self._gathers = self._gathers, []
        for gather in gathers:
            gather.start()

    def reduce(self, grad_scale_factor: int) -> None:
        """Replaces `stage.perform_reduce_grad`, which runs after the last backward pass of a step."""
        if self._wait_reduction is not None and self.stage.has_backward:
            self.stage.start_gradient_reduction()
            self.wait_reduction(grad_scale_factor)
            return
        self._reduce_grad(1)
        if self.stage.has_backward:
            self._defer(grad_scale_factor)

    def wait_reduction(self, grad_scale_factor: int) -> None:
        """Replaces `stage.wait_for_gradient_reduction`, which would divide gradients that are on their way."""
        assert self._wait_reduction is not None  # noqa: S101  # this torch has it
        self._wait_reduction(1)
        self._defer(grad_scale_factor)

    def _defer(self, grad_scale_factor: int) -> None:
        """Has the reduce-scatters that were started waited for before the step, and the gradients divided then."""
        started, self._started = self._started, []
        late: set[Tensor] = set()
        for parameters, work, contribution in started:
            gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
            late.update(gradients)
            wait = functools.partial(_wait, work, contribution, list(gradients.values()), grad_scale_factor)
            self.steps.add(PendingReduction(wait, gradients))
        for parameter in self.stage.submod.parameters():
            if parameter.grad is not None and parameter not in late:
                parameter.grad.div_(grad_scale_factor)

    def start(self, comm: DeferredReduceScatter, output: Tensor, contribution: Tensor, group: Any, op: Any) -> Work:
        """Starts a reduce-scatter in the class of the stage."""
        policy = dataclasses.replace(comm.policy, priority=self.priority)
        with in_order(self.place), labelled(f"segment {len(self._started)} of stage {self.stage.stage_index}"):
            work = comm.start(output, contribution, group, op, policy)
        if self.is_removed or must_wait(comm.parameter_group, output, op, self._told):
            work.wait()
        else:
            parameters = [fsdp_param.sharded_param for fsdp_param in comm.parameter_group.fsdp_params]
            self._started.append((parameters, work, contribution))
        return work

    def remove(self) -> None:
        """Ends the work on this stage: its reduce-scatters are waited for at once."""
        self.is_removed = True
        self._replaced.restore()

    def _unshard(self, unshard: Any, async_op: bool = False) -> Any:
        """Replaces a module's `unshard`: before the first forward pass of a step, it waits for the step."""
        if async_op and not self._has_entered:
            self._gathers.append(_Gather(self, unshard))
            return self._gathers[-1]
        self.steps.use(self.parameters)
        return unshard(async_op=async_op)


class _Gather:
    """The weights of a module that the schedule has asked for: an `UnshardHandle`."""

    def __init__(self, stage: FsdpStage, unshard: Any) -> None:
        self._stage, self._unshard = stage, unshard
        self._handle: Any = None

    def start(self) -> None:
        self._handle = self._unshard(async_op=True)

    def wait(self) -> None:
        if self._handle is None:
            self._stage.gather()
        self._handle.wait()


def _wait(work: Work, contribution: Tensor, gradients: list[Tensor], factor: int) -> None:  # noqa: ARG001
    """`contribution` is kept until here: FSDP2 drops it, and the engine reads it."""
    work.wait()
    for gradient in gradients:
        gradient.div_(factor)
