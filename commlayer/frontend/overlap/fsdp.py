"""`FsdpOverlap`: gradients of a model that FSDP2 shards travel during the next forward pass.

The reduce-scatter of each sharded module is started in its backward pass. FSDP2 takes views of the output, which it
does not read, so the wait can come later: before the module gathers its weights for the next forward pass. Where FSDP2
does read the output, the reduce-scatter is waited for at once: another dtype, replicas, offloaded or accumulated
gradients, hooks on them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch.optim import Optimizer

from ...config import Policy
from ...dynamo import untraced
from ...errors import ConfigError
from ...scheduler.gradient import PendingReduction
from ..gradients.fsdp import GradientReduceScatter, WeightAllGather, check_policy, sharded_modules
from ..work.context import labelled
from .handle import Overlap

log = logging.getLogger("commlayer")

URGENT = 0
"""The class of gathered weights: a forward or backward pass waits for them."""


@untraced
class FsdpOverlap(Overlap):
    """The overlap of one model. `policy` None: that of `compress_fsdp`, or the default."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, policy: Policy | None, staleness: int) -> None:
        groups = parameter_groups(model, policy, "overlap")
        self._managed: dict[nn.Module, list[Tensor]] = {
            module: [fsdp_param.sharded_param for fsdp_param in group.fsdp_params] for module, group in groups.items()
        }
        super().__init__(model, model, optimizer, staleness)
        self._groups = list(dict.fromkeys(groups.values()))
        for group in self._groups:  # forward passes, prefetches and methods of the user's come through here
            group.unshard = functools.partial(self._unshard, group, group.unshard)
        self._started: list[tuple[list[Tensor], Work, Tensor]] = []
        self._is_queued = False
        self._told: set[str] = set()
        defer_collectives(groups, policy, self)

    def remove(self) -> None:
        try:
            super().remove()
        finally:
            for group in self._groups:
                vars(group).pop("unshard", None)

    def _unshard(self, group: Any, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Takes the place of a parameter group's `unshard`, which reads memory of the shards."""
        self._deferred.use([fsdp_param.sharded_param for fsdp_param in group.fsdp_params])
        unshard(*args, **kwargs)

    def _users(self) -> list[nn.Module]:
        return list(self._managed)

    def _begin(self) -> None:
        self._started.clear()  # not empty after a backward pass that failed
        self._is_queued = False
        if not torch.is_grad_enabled():
            self.finish()
        elif not self._order.is_learned:
            self._order.begin()

    def _enter(self, module: nn.Module) -> None:
        managed = self._managed.get(module)
        if managed is None:
            return
        if not self._order.is_learned:
            for parameter in managed:
                self._order.use(parameter)
        self._deferred.use(managed)

    def later(self, group: Any, output: Tensor, op: Any) -> bool:
        """Whether the reduce-scatter of this parameter group into `output` may be waited for later."""
        return not self.is_removed and not must_wait(group, output, op, self._told)

    def start(self, comm: DeferredReduceScatter, output: Tensor, contribution: Tensor, group: Any, op: Any) -> Work:
        """Starts a reduce-scatter in the class of its parameters."""
        parameters = [fsdp_param.sharded_param for fsdp_param in comm.parameter_group.fsdp_params]
        self._agree(comm.check(group, contribution))
        priority = self._class_of(parameters, comm.policy)
        with self._in_order(parameters), labelled(f"segment {len(self._started)}"):
            work = comm.start(output, contribution, group, op, dataclasses.replace(comm.policy, priority=priority))
        if not self.later(comm.parameter_group, output, op):
            work.wait()
            return work
        if not self._is_queued:  # FSDP2's own callback was queued before the backward pass began
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._started.append((parameters, work, contribution))
        return work

    def _end_backward(self) -> None:
        """The backward pass has ended."""
        self._is_queued = False
        started, self._started = self._started, []
        for parameters, work, contribution in started:
            gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
            self._deferred.add(PendingReduction(functools.partial(_wait, work, contribution), gradients))


class Starter(Protocol):
    """Starts the reduce-scatters of modules, and waits for them or not."""

    is_removed: bool

    def start(self, comm: DeferredReduceScatter, output: Tensor, contribution: Tensor, group: Any, op: Any) -> Work: ...


class DeferredReduceScatter(GradientReduceScatter):
    """The `ReduceScatter` of FSDP2 for one module, which an overlap waits for.

    `given`: the policy of `compress_fsdp`; None: there was none, and the overlap's own `policy` ends with the overlap.
    """

    def __init__(
        self, given: Policy | None, policy: Policy | None, number: int, handle: Starter, parameter_group: Any
    ) -> None:
        super().__init__(given or policy or Policy(), number)
        self.given = given
        self.handle = handle
        self.parameter_group = parameter_group

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        work = self.handle.start(self, output_tensor, input_tensor, group, op)
        return work if async_op else None


def _wait(work: Work, contribution: Tensor) -> None:  # noqa: ARG001  # FSDP2 drops it, and the engine still reads it
    work.wait()


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of a sharded module: one per mesh. Before torch 2.12 there is one, or None."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def parameter_groups(model: nn.Module, policy: Policy | None, who: str) -> dict[Any, Any]:
    """The parameters that FSDP2 gathers, by module; modules without parameters of their own are left out.

    Raises ConfigError for several meshes, and for a policy that FSDP2 cannot follow.
    """
    check_policy(policy or Policy(), "none", None)
    found = {}
    for module in sharded_modules(model):
        groups = groups_of(_state(module))
        if len(groups) > 1:
            raise ConfigError(
                f"{who}({type(module).__name__}): its parameters are sharded over several meshes, and FSDP2 takes one "
                f"ReduceScatter; use one mesh"
            )
        if groups:
            found[module] = groups[0]
    if policy is not None and any(_given_policy(group) is not None for group in found.values()):
        raise ConfigError(f"{who}(policy=...): compress_fsdp has given this model a policy; leave this one out")
    return found


def defer_collectives(groups: dict[Any, Any], policy: Policy | None, handle: Starter, first: int = 0) -> None:
    """Gives modules a reduce-scatter that `handle` starts, and an urgent all-gather. They get numbers from `first`."""
    for number, (module, group) in enumerate(groups.items(), first):
        comm = DeferredReduceScatter(_given_policy(group), policy, 3 * number, handle, group)
        module.set_custom_reduce_scatter(comm)
        gather = getattr(group, "_all_gather_comm", None)
        if isinstance(gather, WeightAllGather):  # compress_fsdp made it, or an earlier overlap
            gather.set_priority(URGENT)
        else:
            of_weights = dataclasses.replace(comm.policy, codec="none", priority=URGENT)
            module.set_custom_all_gather(WeightAllGather(of_weights, 3 * number + 1))


def _given_policy(group: Any) -> Policy | None:
    """The policy that `compress_fsdp` has given, or an overlap that is not removed."""
    comm = getattr(group, "_reduce_scatter_comm", None)
    if isinstance(comm, DeferredReduceScatter) and comm.handle.is_removed:
        return comm.given
    return comm.policy if isinstance(comm, GradientReduceScatter) else None


def must_wait(group: Any, output: Tensor, op: Any, told: set[str]) -> bool:
    """Whether FSDP2 reads `output` before the backward pass ends; the log tells each reason once."""
    reason = _reason_to_wait(group, output, op)
    if reason is not None and reason not in told:
        told.add(reason)
        log.warning("overlap: %s: the backward pass waits for the gradients, and results stay exact", reason)
    return reason is not None


def _reason_to_wait(group: Any, output: Tensor, op: Any) -> str | None:
    """The reason for which FSDP2 reads `output` before the backward pass ends; None: it does not."""
    parameters = [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
    kind = getattr(op, "op", op)
    reasons = (
        (any(parameter.grad is not None for parameter in parameters), "gradients accumulate in shards"),
        (
            any(parameter.dtype != output.dtype for parameter in parameters),
            "reduce_dtype differs from the parameters' dtype",
        ),
        (kind == dist.ReduceOp.SUM, "FSDP2 divides gradients after the reduction"),
        (hasattr(group.mesh_info, "replicate_process_group"), "gradients are averaged over replicas, too"),
        (group._all_reduce_hook is not None, "an all-reduce hook reads gradients"),
        (any(fsdp_param.offload_to_cpu for fsdp_param in group.fsdp_params), "gradients are offloaded"),
        (
            any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters),
            "hooks read gradients",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), None)
