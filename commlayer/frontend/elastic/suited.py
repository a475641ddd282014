"""Which models, optimizers and datasets a job can train."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...config import number
from ...errors import ConfigError
from ..gradients.fsdp import averages_replicas, sharded_modules
from ..group.backend import CommProcessGroup


def check_world(model: nn.Module, min_size: int, *, joins: bool) -> CommProcessGroup | None:
    """WORLD; None for a process that joins. Raises ConfigError for one that a job cannot use, and for `min_size`."""
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    if joins:
        if world is not None and not sharded_modules(model):
            raise ConfigError(
                "elastic(join=...): this process has a WORLD, and its model is not sharded; leave init_process_group "
                "to the job, or share the model within a row of ranks by fully_shard before elastic()"
            )
        if isinstance(world, CommProcessGroup):
            _check_lossless(world, "elastic(join=...)")
        if min_size < 1:
            raise ConfigError(f"elastic(min_size={min_size}): use 1 or more, as the job does")
        return None
    if not isinstance(world, CommProcessGroup):
        raise ConfigError("elastic: the job's WORLD is not one of commlayer; init_process_group('commlayer') first")
    who = f"rank {dist.get_rank()}: elastic"
    if not 1 <= min_size <= world.size():
        raise ConfigError(f"{who}(min_size={min_size}): use 1 to {world.size()}, the number of ranks")
    _check_lossless(world, who)
    return world


def _check_lossless(world: CommProcessGroup, who: str) -> None:
    if world.policy.loss_bound > 0:
        raise ConfigError(
            f"{who}: WORLD has loss_bound={world.policy.loss_bound:g}, and a step needs all contributions; make WORLD "
            f"without a loss bound"
        )


def check_model(model: nn.Module, world: Any, who: str) -> None:
    """Raises ConfigError unless all ranks have all of the model, in float32 on the CPU. `world` is None at a joiner."""
    if any(hasattr(each, "device_mesh") or hasattr(each, "_is_flat_param") for each in model.parameters()):
        raise ConfigError(
            f"{who}: the model is sharded (FSDP, DTensor): it needs all parameters on each rank, or a model that "
            f"FSDP2's fully_shard divides within rows of ranks, each of which has all of it"
        )
    _check_type(model, who)
    if any(isinstance(each, DistributedDataParallel) for each in model.modules() if each is not model):
        raise ConfigError(
            f"{who}: DistributedDataParallel is within another module, and would average gradients once more; put it "
            f"around the whole model, or leave it out"
        )
    if isinstance(model, DistributedDataParallel):
        if model.static_graph:
            raise ConfigError(f"{who}: the model has static_graph=True, which needs averages of its own; leave it out")
        if model.process_group is not world:
            raise ConfigError(f"{who}: the model has a process group of its own; make it without one")
        if model.broadcast_buffers and any(True for _ in model.buffers()):
            is_renamed = hasattr(model, "forward_sync_buffers")  # since torch 2.13, which warns of the former name
            remedy = f"{'forward_sync_buffers' if is_renamed else 'broadcast_buffers'}=False"
            raise ConfigError(f"{who}: the model broadcasts buffers; give DistributedDataParallel {remedy}")


def reshard(modules: Collection[Any]) -> None:
    """Frees the copies of parameters that FSDP2 has gathered: the next forward pass gathers them again."""
    for module in modules:
        module.reshard()


def row_of(model: nn.Module, who: str, *, joins: bool) -> CommProcessGroup | None:
    """The group between whose ranks `fully_shard` divides the model; None: it does not. Parameters that it has gathered
    are divided again. `joins`: the row joins a job, from a WORLD of its own. Raises ConfigError for a model that a job
    of rows cannot train."""
    modules = sharded_modules(model)
    if not modules:
        return None
    reshard(modules)
    _check_type(model, who)
    if averages_replicas(model):
        raise ConfigError(
            f"{who}: compress_fsdp(replicate=...) averages over the rows by itself, in the backward pass, with equal "
            f"weights, and a death ends that on all ranks; call compress_fsdp without replicate: the job averages over "
            f"the rows"
        )
    meshes = dict[Any, None]()
    for name, each in model.named_parameters():
        mesh = getattr(each, "device_mesh", None)
        if mesh is not None:
            meshes[mesh] = None
        elif each.requires_grad:
            raise ConfigError(
                f"{who}: fully_shard divides a part of the model, and the ranks of a row would train {name} apart: "
                f"call fully_shard for the whole model, too"
            )
    if len(meshes) != 1:
        raise ConfigError(f"{who}: fully_shard has {len(meshes)} meshes in this model: use the same for all modules")
    mesh = next(iter(meshes))
    if mesh.ndim != 1:
        raise ConfigError(
            f"{who}: fully_shard has a mesh of {mesh.ndim} dimensions: it would average over the rows by itself, in "
            f"the backward pass, which a death ends on all ranks; give it the dimension of the shards, as "
            f"fully_shard(model, mesh=mesh['shards']): the job averages over the rows"
        )
    group = mesh.get_group()
    if not isinstance(group, CommProcessGroup):
        raise ConfigError(
            f"{who}: the mesh of fully_shard has a group of {type(group).__name__}: make it, after "
            f"init_process_group('commlayer'), without a backend_override"
        )
    if not joins and group.size() == dist.get_world_size():
        raise ConfigError(
            f"{who}: fully_shard divides the model between all {group.size()} ranks, so nobody could go on without one "
            f"of them; use rows of ranks, each of which has all of the model: init_device_mesh('cpu', (rows, shards))"
        )
    return group


def _check_type(model: nn.Module, who: str) -> None:
    kinds = {(each.dtype, each.device.type) for each in model.parameters() if each.requires_grad}
    if kinds != {(torch.float32, "cpu")}:
        told = ", ".join(sorted(f"{str(dtype).removeprefix('torch.')} on {device}" for dtype, device in kinds))
        raise ConfigError(f"{who}: parameters of {told or 'no type'}: it needs float32 on the CPU")


def check_trained(optimizer: torch.optim.Optimizer, trained: Collection[Tensor], who: str) -> None:
    """Raises ConfigError if the optimizer changes parameters beside these, whose gradients are averaged."""
    for each in (each for group in optimizer.param_groups for each in group["params"]):
        if each.requires_grad and each not in trained:
            raise ConfigError(
                f"{who}: the optimizer has a parameter of shape {tuple(each.shape)} whose gradient is not averaged: "
                f"the model did not have it, or it was frozen, when elastic() began; give a model that has it, and "
                f"begin another elastic() after unfreezing"
            )


def check_stepped(stepped: Any, who: str) -> None:
    """Raises ConfigError unless the optimizer, or the schedule of its learning rate, steps without arguments."""
    for name, given in inspect.signature(stepped.step).parameters.items():
        is_open = given.kind in (given.VAR_POSITIONAL, given.VAR_KEYWORD)
        # A schedule has wrapped the step of its optimizer, whose signature then has `self`.
        if given.default is inspect.Parameter.empty and not is_open and name != "self":
            fault = "computes gradients within its step (it needs a closure)" if name == "closure" else f"needs {name}"
            raise ConfigError(f"{who}: {type(stepped).__name__} {fault}; use one whose step() takes no argument")


def check_norm(clip_norm: Any, who: str) -> float | None:
    """The norm. Raises ConfigError if it is none."""
    if clip_norm is None:
        return None
    found = number(clip_norm)
    if not 0 < found < math.inf:
        raise ConfigError(f"{who}(clip_norm={clip_norm!r}): use the largest norm of all gradients, a number above 0")
    return found


def size_of(dataset: Any, batch_size: int, seed: int, row_size: int, who: str) -> int:
    """The number of samples. Raises ConfigError for a dataset without one, for a wrong batch or seed, and for numbers
    that rows of `row_size` ranks cannot share."""
    length: Callable[[], int] | None = getattr(dataset, "__len__", None)
    if length is None or length() < 1:
        raise ConfigError(f"{who}: {type(dataset).__name__} has no samples with a number; use a dataset with a length")
    if type(batch_size) is not int or batch_size < 1:
        raise ConfigError(f"{who}: batch_size={batch_size!r}: use the number of samples in a step of all ranks")
    if type(seed) is not int or not 0 <= seed < 1 << 32:
        raise ConfigError(f"{who}: seed={seed!r}: use a whole number from 0 to 2**32 - 1")
    for name, count in (("batch_size", batch_size), ("the number of samples", length())):
        if count % row_size:
            raise ConfigError(
                f"{who}: {name} is {count}, and the ranks of a row take equally many: use a multiple of {row_size}, as "
                f"{count - count % row_size or row_size}"
            )
    return length()
