"""`compress_fsdp`: codecs for a model that FSDP2 shards (`fully_shard`).

FSDP2 lets each module replace its collectives by objects. The objects here start the operations that FSDP2 would start
by itself, with a codec: the reduce-scatter of gradients, the all-gather of weights and, between replicas, the
all-reduce of gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions, Work

from ...compress.codec import STATELESS
from ...config import Config, Policy
from ...errors import ConfigError
from ..group.backend import CommProcessGroup
from .disabled import refuse, warn
from .hook_group import plain_reduce_scatter
from .reducer import divide_first

Weights = Literal["none", "bf16", "int8"]
"""Codecs of an all-gather of weights; "none": as they are."""

_gathering: WeakSet[nn.Module] = WeakSet()
"""Modules whose all-gather an earlier call has replaced."""

_averaging: WeakSet[nn.Module] = WeakSet()
"""Modules whose gradients an earlier call averages over replicas."""


def compress_fsdp(
    model: nn.Module, policy: Policy, *, weights: Weights = "none", replicate: dist.ProcessGroup | None = None
) -> None:
    """Encodes the traffic of all sharded modules in `model`. All ranks call it, after `fully_shard`.

    Gradients travel in the codec of `policy` between hosts, weights in the codec `weights`. The forward and backward
    passes then see rounded weights, equal on all ranks; the optimizer's shards stay exact. `replicate` is a group of
    replicas: the gradients of a model that is sharded over one mesh dimension are then averaged over this group, too.
    The group of the shards may then be of another backend, as NCCL, which reduces as without this call. Another call
    replaces policy, weights and replicas.

    Raises ConfigError for a model without such modules, for arguments of another type, for policies that FSDP2 cannot
    follow, and for a group that does not consist of replicas. The first step raises it for groups of other backends or
    settings, and for other types than float32.
    """
    check_policy(policy, weights, replicate)
    if Config.is_disabled():
        if replicate is not None:
            refuse("compress_fsdp(replicate=...)", "nothing would average over replicas; give fully_shard a 2-D mesh")
        warn("compress_fsdp", "traffic travels as it is")
        return
    modules = sharded_modules(model)
    _check_shards(model, modules, replicate)
    for number, module in enumerate(modules):
        module.set_custom_reduce_scatter(GradientReduceScatter(policy, 3 * number, any_backend=replicate is not None))
        if weights != "none" or module in _gathering:
            of_weights = dataclasses.replace(policy, codec=weights)
            module.set_custom_all_gather(WeightAllGather(of_weights, 3 * number + 1))
            _gathering.add(module)
        if replicate is not None:
            module.set_all_reduce_hook(GradientAllReduce(policy, 3 * number + 2, replicate))
            _averaging.add(module)


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called for."""
    return [module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter")]


def averages_replicas(model: nn.Module) -> bool:
    """Whether `compress_fsdp(replicate=...)` averages its gradients over a group that its mesh does not have."""
    return any(module in _averaging for module in sharded_modules(model))


class Encoded:
    """A collective of one module. `number` differs between the collectives of a model."""

    remedy = ""
    """Advice for tensors of other types than float32."""

    def __init__(self, policy: Policy, number: int) -> None:
        self.policy = policy
        self._number = number
        self._begun = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the collective."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def key(self) -> int:
        """The codec key of the next operation: equal on all ranks, because FSDP2 makes the same calls on all."""
        self._begun += 1
        return self._begun << 16 | self._number

    def check(self, group: dist.ProcessGroup, tensor: Tensor) -> CommProcessGroup:
        """The group, if it can encode this tensor. Raises ConfigError otherwise."""
        who = f"rank {dist.get_rank()}: compress_fsdp, codec {self.policy.codec!r}"
        if not isinstance(group, CommProcessGroup):
            raise ConfigError(
                f"{who}: the group {group.group_name!r} of this model is not commlayer's; call "
                f"init_process_group('commlayer'), or name 'commlayer' in the backend_override of the mesh"
            )
        if group.devices is not None and group.devices.neighbour(tensor.device.type) is not None:
            raise ConfigError(
                f"{who}: another backend has the {tensor.device.type} tensors of the group; call "
                f"init_process_group('commlayer') without a backend for {tensor.device.type}"
            )
        # An operation follows its group in these; encoded ones have one algorithm.
        for name in ("deterministic", "algorithm") if self.policy.codec == "none" else ("deterministic",):
            wanted, has = getattr(self.policy, name), getattr(group.policy, name)
            if wanted not in (has, getattr(Policy, name)):
                raise ConfigError(
                    f"{who}: Policy({name}={wanted!r}): the group {group.group_name!r} of this model has "
                    f"{name}={has!r}; make it with pg_options=commlayer.Options(commlayer.Policy({name}={wanted!r})), "
                    f"or with the same in the backend_override of the mesh"
                )
        if tensor.dtype != torch.float32 and self.policy.codec != "none":
            raise ConfigError(f"{who}: {tensor.dtype} instead of float32; {self.remedy}")
        return group


class GradientReduceScatter(Encoded):
    """The `ReduceScatter` of FSDP2. `any_backend`: groups of other backends reduce as they do without it, because
    gradients are encoded between the replicas."""

    remedy = "use MixedPrecisionPolicy(reduce_dtype=torch.float32)"

    def __init__(self, policy: Policy, number: int, *, any_backend: bool = False) -> None:
        super().__init__(policy, number)
        self._any_backend = any_backend

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        if self._any_backend and not isinstance(group, CommProcessGroup):
            return plain_reduce_scatter(output_tensor, input_tensor, op, group, async_op)  # type: ignore[no-any-return]
        return _awaited(self.start(output_tensor, input_tensor, group, op, self.policy), async_op)

    def start(self, output: Tensor, contribution: Tensor, group: dist.ProcessGroup, op: Any, policy: Policy) -> Work:
        """Starts the reduce-scatter, and does not wait for it."""
        options = ReduceScatterOptions()
        options.reduceOp = op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)
        made = self.check(group, contribution)
        return made.reduce_scatter_single(output, contribution, options, policy=policy, key=self.key())


class WeightAllGather(Encoded):
    """The `AllGather` of FSDP2.

    With `reshard_after_forward=NUMBER`, the backward pass gathers parts of the weights that the forward pass has seen,
    in a smaller group. They are rounded already, so they travel as they are.
    """

    remedy = "use weights='none', or a MixedPrecisionPolicy without param_dtype"

    def __init__(self, policy: Policy, number: int) -> None:
        super().__init__(policy, number)
        self._again = dataclasses.replace(policy, codec="none")
        self._group: dist.ProcessGroup | None = None
        """That of the shards: the largest one."""

    def set_priority(self, priority: int) -> None:
        """Gives the next gathers this class, encoded or not."""
        self.policy = dataclasses.replace(self.policy, priority=priority)
        self._again = dataclasses.replace(self._again, priority=priority)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        made = self.check(group, input_tensor)
        if self._group is None or group.size() > self._group.size():
            self._group = group
        options, policy = AllgatherOptions(), self.policy if group is self._group else self._again
        work = made.all_gather_single(output_tensor, input_tensor, options, policy=policy, key=self.key())
        return _awaited(work, async_op)


class GradientAllReduce(Encoded):
    """The all-reduce hook of FSDP2: averages reduced gradients over replicas."""

    remedy = GradientReduceScatter.remedy

    def __init__(self, policy: Policy, number: int, group: dist.ProcessGroup) -> None:
        super().__init__(policy, number)
        self.group = group

    def __call__(self, gradients: Tensor) -> None:
        group = self.check(self.group, gradients)
        options = AllreduceOptions()
        is_divided = divide_first(gradients, group) > 1
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM if is_divided else dist.ReduceOp.AVG)
        group.allreduce_from(gradients, gradients, options, policy=self.policy, key=self.key()).wait()


def _awaited(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def check_policy(policy: Policy, weights: str, replicate: dist.ProcessGroup | None) -> None:
    given = policy if not isinstance(policy, Policy) else f"Policy(codec={policy.codec!r})"
    if not isinstance(policy, Policy):
        fault = "give a Policy, as Policy(codec='int8')"
    elif policy.codec not in STATELESS:
        fault = f"FSDP2 has no place for the state of this codec; use one of {', '.join(STATELESS)}"
    elif policy.loss_bound:
        fault = f"and loss_bound={policy.loss_bound}: FSDP2 has no place for lost gradients; use loss_bound=0"
    elif weights not in get_args(Weights):
        fault = f"and weights={weights!r}: use one of {', '.join(get_args(Weights))}"
    elif not isinstance(replicate, (dist.ProcessGroup, type(None))):
        fault = f"and replicate={replicate!r}: give a process group, as mesh.get_group('replicate')"
    else:
        return
    raise ConfigError(f"compress_fsdp({given}): {fault}")


def _check_shards(model: nn.Module, modules: Sequence[nn.Module], replicate: dist.ProcessGroup | None) -> None:
    """Raises ConfigError unless the model is sharded, and `replicate` has its replicas: ranks with the same shards."""
    name = type(model).__name__
    # DTensor has `placements`, and takes long to import. After a forward pass, parameters may be plain tensors.
    parameters: list[Any] = [parameter for parameter in model.parameters() if hasattr(parameter, "placements")]
    is_whole = parameters and not any(
        placement.is_shard() for parameter in parameters for placement in parameter.placements
    )
    if not modules or is_whole:
        raise ConfigError(f"compress_fsdp({name}): nothing in it is sharded; call fully_shard first")
    if replicate is None:
        if averages_replicas(model):
            raise ConfigError(
                "compress_fsdp(replicate=None): an earlier call averages the gradients of this model over replicas, "
                "which would drift apart; give it again, as replicate=mesh.get_group('replicate')"
            )
        return
    rank, members = dist.get_rank(), set(dist.get_process_group_ranks(replicate))
    for parameter in parameters:
        if len(parameter.placements) > 1 and parameter.placements[0].is_replicate():
            raise ConfigError(
                "compress_fsdp(replicate=...): fully_shard averages the gradients of this model over its replicas "
                "already, without a codec; give it the mesh dimension of the shards alone"
            )
        others = members.intersection(parameter.device_mesh.mesh.flatten().tolist()) - {rank}
        if others:
            raise ConfigError(
                f"rank {rank}: compress_fsdp(replicate=...): ranks {sorted(others)} of the group "
                f"{replicate.group_name!r} have other shards of {name}; give a group of ranks with the same shards, as "
                f"mesh.get_group('replicate')"
            )
