"""Cases of data parallelism for test_torch_paths.py: DistributedDataParallel, optimizers, FSDP1 and FSDP2."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers, utils
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.process.compat.test_ddp import Net, data, losses_of, train

SIZE = 2
CPU = torch.device("cpu")


def whole(values: Any) -> list[Tensor]:
    """Copies of tensors, gathered where they are sharded."""
    return [(value.full_tensor() if isinstance(value, DTensor) else value).detach().clone() for value in values]


def layers(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)))


def mesh_of(*names: str) -> DeviceMesh:
    """All ranks in the first dimension."""
    return init_device_mesh("cpu", (SIZE, *(1 for _ in names[1:])), mesh_dim_names=names)


# ---- DistributedDataParallel and optimizers -------------------------------------------------------------------------


def post_local_sgd(rank: int) -> Any:
    model = DistributedDataParallel(layers())
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        model(data(rank, step)).square().mean().backward()
        optimizer.step()
        found.append(whole(model.parameters()))
    return found


def average_parameters(rank: int) -> Any:
    model = layers()
    for parameter in model.parameters():
        parameter.data *= rank + 1
    assert dist.group.WORLD is not None
    utils.average_parameters(iter(model.parameters()), dist.group.WORLD)
    return whole(model.parameters())


def zero_in_bucket_views(rank: int) -> Any:
    model = DistributedDataParallel(layers())
    kind: Any = torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, parameters_as_bucket_view=True, lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(data(rank, step)).square().mean().backward()
        optimizer.step()
    return whole(model.parameters())


def join_of_ddp_and_zero(rank: int) -> Any:
    model = DistributedDataParallel(layers())
    kind: Any = torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.01)
    with Join([model, optimizer]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(data(rank, step)).square().mean().backward()
            optimizer.step()
    return whole(model.parameters())


def synchronized_batch_norm(rank: int) -> Any:
    """torch has it on accelerators only, and says so, whatever the backend."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net())
    with pytest.raises(ValueError, match="only work with GPU modules") as caught:
        DistributedDataParallel(model)
    return str(caught.value)


def ddp_of_a_mesh(rank: int) -> Any:
    return train(DistributedDataParallel(Net(), device_mesh=mesh_of("replicate"), bucket_cap_mb=0.01), rank)


def composable_replicate(rank: int) -> Any:
    model = Net()
    replicate(model, bucket_cap_mb=0.01)
    return train(model, rank)


# ---- fully sharded --------------------------------------------------------------------------------------------------


def sharded(mesh: DeviceMesh | None = None, count: int = 3) -> Any:
    model = layers(count)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_accumulates(rank: int) -> Any:
    model = sharded()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model(data(rank, step)).square().mean().backward()
    return whole(parameter.grad for parameter in model.parameters())


def fsdp2_clips_and_prefetches(rank: int) -> Any:
    model = sharded()
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        model(data(rank, step)).square().mean().backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(norm.full_tensor())
        optimizer.step()
    return [norms, whole(model.parameters())]


def fsdp2_of_tensor_parallel_layers(rank: int) -> Any:
    found = []
    for shape in ((SIZE, 1), (1, SIZE)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        found += [losses_of(model, mesh.get_local_rank("data")), whole(model.parameters())]
    return found


def fsdp1_states(rank: int) -> Any:
    model = FullyShardedDataParallel(layers(), device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with model.no_sync():
        model(data(rank, 0)).square().mean().backward()
    model(data(rank, 1)).square().mean().backward()
    norm = model.clip_grad_norm_(0.1)
    optimizer.step()
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    state = model.state_dict()
    moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return [norm, whole(state.values()), [moments[name]["exp_avg"] for name in sorted(moments)]]


def whole_states_from_rank_0(rank: int) -> Any:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(data(rank, 0)).square().mean().backward()
    optimizer.step()
    options = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = checkpoint.get_state_dict(model, optimizer, options=options)
    torch.manual_seed(99)
    other = sharded()
    moments = torch.optim.AdamW(other.parameters(), lr=0.01)
    options = checkpoint.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given: Any = states if rank == 0 else ({}, {})
    checkpoint.set_model_state_dict(other, given[0], options=options)
    checkpoint.set_optimizer_state_dict(other, moments, given[1], options=options)
    return [whole(other.parameters()), whole(moment["exp_avg"] for moment in moments.state.values())]
