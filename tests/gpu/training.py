"""Checks that train a model on the device, beside the same training on the host. See `checks`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlayer
from tests.gpu.lab import Lab


def hook(lab: Lab, rank: int, size: int) -> None:
    """DDP with our hook has the parameters of the same training on the host."""
    for mine, theirs in zip(_train(lab, rank), _train(None, rank), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 6))


def _train(lab: Lab | None, rank: int) -> list[Tensor]:
    net: nn.Module = _net()
    state = commlayer.HookState(commlayer.Policy(deterministic=True))
    average = commlayer.allreduce_hook
    if lab is not None:
        net, average = lab.model(net), lab.hook(average)
        lab.stage(state.group())
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=0.002)
    model.register_comm_hook(state, average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        inputs = torch.randn(8, 20, generator=generator)
        model(inputs if lab is None else inputs.to(lab.device)).square().mean().backward()
        if lab is not None:
            lab.order()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def ddp(lab: Lab, rank: int, size: int) -> None:
    """DDP without a hook, whose futures C++ asks for, has the parameters of the same training on the host."""
    found = []
    for net, device in ((lab.model(_net()), lab.device), (_net(), torch.device("cpu"))):
        model = DistributedDataParallel(net, bucket_cap_mb=0.002)
        _loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, device)
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def amp(lab: Lab, rank: int, size: int) -> None:
    """DDP with autocast and scaled gradients ends with finite parameters, the same on both ranks."""
    model = DistributedDataParallel(lab.model(_net()))
    scaler = torch.amp.GradScaler(lab.device.type)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        with torch.autocast(lab.device.type, dtype=torch.bfloat16):
            loss = model(torch.randn(8, 20, device=lab.device)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    assert bool(mine.isfinite().all())
    assert torch.equal(lab.read(mine), lab.read(theirs))


def overlap(lab: Lab, rank: int, size: int) -> None:
    """With `commlayer.overlap`, training has the parameters of the same training on the host."""
    found = []
    for net, device in ((lab.model(_net()), lab.device), (_net(), torch.device("cpu"))):
        model = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = commlayer.overlap(model, optimizer, commlayer.Policy(deterministic=True, codec="bf16"))
        _loop(model, optimizer, rank, device)
        handle.finish()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


def within(lab: Lab, rank: int, size: int) -> None:
    """DDP with a hook that sums gradients within a group first has the parameters of the same training on the host.

    With a GPU for each rank the group is NCCL's.
    """
    has_nccl = lab.device.type == "cuda" and torch.cuda.device_count() >= size
    inner = dist.new_group(backend="nccl") if has_nccl else dist.group.WORLD
    found = []
    for net, device, group in (
        (lab.model(_net()), lab.device, inner),
        (_net(), torch.device("cpu"), dist.group.WORLD),
    ):
        model = DistributedDataParallel(net, bucket_cap_mb=0.002)
        state = commlayer.HookState(commlayer.Policy(deterministic=True), within=group)
        model.register_comm_hook(state, commlayer.allreduce_hook)
        _loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, device)
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def fsdp(lab: Lab, rank: int, size: int) -> None:
    """FSDP2, which waits on streams of its own, has the parameters of the same training on the host."""
    _sharded(lab, rank, (size,))


def hsdp(lab: Lab, rank: int, size: int) -> None:
    """The same with replicas of the shards: FSDP2's HSDP."""
    _sharded(lab, rank, (size, 1))


def hsdp_nccl(lab: Lab, rank: int, size: int) -> None:
    """HSDP as in docs/tutorials/hsdp.md: the shards are NCCL's, and commlayer averages over the replicas, in a codec.

    Each shard has one rank, as NCCL takes no two on one GPU.
    """
    found = []
    for net, device in ((lab.model(_net()), lab.device), (_net(), torch.device("cpu"))):
        mesh = init_device_mesh(
            device.type,
            (size, 1),
            mesh_dim_names=("replicate", "shard"),
            backend_override={"replicate": "commlayer", "shard": "nccl" if device.type == "cuda" else "gloo"},
        )
        for layer in net.children():
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(net, mesh=mesh["shard"])
        commlayer.compress_fsdp(net, commlayer.Policy(codec="bf16"), replicate=mesh.get_group("replicate"))
        _loop(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), rank, device)
        shards: list[Any] = list(net.parameters())
        found.append([shard.detach().to_local().cpu() for shard in shards])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


def _sharded(lab: Lab, rank: int, shape: tuple[int, ...]) -> None:
    found = []
    for net, device in ((lab.model(_net()), lab.device), (_net(), torch.device("cpu"))):
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in net.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        _loop(net, optimizer, rank, device)
        shards: list[Any] = list(net.parameters())
        found.append([shard.detach().to_local().cpu() for shard in shards])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def local_steps(lab: Lab, rank: int, size: int) -> None:
    """`LocalSteps`, exact and then local, has the parameters of the same training on the host."""
    for exact_steps in (99, 2):
        found = []
        for net, device in ((lab.model(_net()), lab.device), (_net(), torch.device("cpu"))):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            with commlayer.LocalSteps(net, optimizer, 2, 1, (1, 0), "none", exact_steps=exact_steps):
                _loop(net, optimizer, rank, device)
            found.append([parameter.detach().cpu() for parameter in net.parameters()])
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        model(torch.randn(8, 20, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


ON_GPUS = (ddp, amp, overlap, within, local_steps, fsdp, hsdp, hsdp_nccl)
"""Those for which a fake of a GPU is not enough."""
