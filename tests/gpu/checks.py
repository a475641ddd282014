"""The checks. Each is called on two ranks of a job, with the device of the rank; an AssertionError is its failure."""

import functools
import math
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlayer
from tests import ranks
from tests.gpu.lab import Lab, waits

Check = Callable[[Lab, int, int], None]


def collectives(lab: Lab, rank: int, size: int) -> None:
    """The results of operations on the device are those on the host."""
    on_device = [lab.read(collective) for collective in _collectives(lab.tensor, rank, size)]
    on_host = _collectives(torch.clone, rank, size)
    for mine, theirs in zip(on_device, on_host, strict=True):
        assert torch.equal(mine.reshape(-1), theirs.reshape(-1)), (mine, theirs)


def _collectives(place: Callable[[Tensor], Tensor], rank: int, size: int) -> list[Tensor]:
    def own(count: int = 8) -> Tensor:
        return place(torch.arange(float(count)) + 100 * rank)

    def room(count: int = 8) -> Tensor:
        return place(torch.zeros(count))

    reduced, sent, exchanged = own(), own(), room(2 * size)
    gathered, scattered = [room() for _ in range(size)], room(4)
    dist.all_reduce(reduced)
    dist.broadcast(sent, 1)
    dist.all_gather(gathered, own())
    dist.reduce_scatter(scattered, [own(4) for _ in range(size)])
    dist.all_to_all_single(exchanged, own(2 * size))
    dist.barrier()
    rooms = [room() for _ in range(size)] if rank == 0 else None
    dist.gather(own(), rooms)
    return [reduced, sent, *gathered, scattered, exchanged, *(rooms or [])]


def order(lab: Lab, rank: int, size: int) -> None:
    """The engine reads after earlier kernels, and later kernels read after the engine."""
    for number in range(5):
        tensor = lab.tensor(torch.zeros(1 << 16))
        lab.busy(0.05)
        lab.launch(functools.partial(tensor.fill_, rank + number))
        dist.all_reduce(tensor, async_op=True).wait()
        lab.launch(functools.partial(tensor.mul_, 2))
        assert torch.equal(lab.read(tensor), torch.full((1 << 16,), 2.0 * (1 + 2 * number)))


def host_goes_on(lab: Lab, rank: int, size: int) -> None:
    """`wait()` returns before the other rank has called the operation."""
    tensor = lab.tensor(torch.full((1 << 16,), 1.0))
    store = ranks.store()
    if rank == 1 and waits(lab):
        store.wait(["waited"])
    dist.all_reduce(tensor)
    store.set("waited", "1")
    assert float(lab.read(tensor).max()) == size


def many_in_flight(lab: Lab, rank: int, size: int) -> None:
    """A hundred operations of different sizes, waited for in another order."""
    tensors = [lab.tensor(torch.full((1 + 997 * number,), number + rank + 0.0)) for number in range(100)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(tensors):
        assert torch.equal(lab.read(tensor), torch.full((1 + 997 * number,), 2.0 * number + 1))


def messages(lab: Lab, rank: int, size: int) -> None:
    """Both ranks receive, send and wait, as in a pipeline; with one queue for all streams, too."""
    mine, theirs = lab.tensor(torch.full((4096,), rank + 1.0)), lab.tensor(torch.zeros(4096))
    for _ in range(10):
        receive = dist.irecv(theirs, 1 - rank)
        send = dist.isend(mine, 1 - rank)
        assert receive is not None
        assert send is not None
        receive.wait()
        send.wait()
        lab.launch(lambda: mine.copy_(theirs + 1))
    assert torch.equal(lab.read(mine), torch.full((4096,), rank + 11.0))


def memory(lab: Lab, rank: int, size: int) -> None:
    """Temporary tensors are freed at once, and their memory is not used again too early."""
    total = lab.tensor(torch.zeros(1 << 14))
    for number in range(50):
        temporary = lab.tensor(torch.full((1 << 14,), float(number)))
        dist.all_reduce(temporary, async_op=True).wait()
        lab.launch(functools.partial(total.add_, temporary))
        del temporary
    assert torch.equal(lab.read(total), torch.full((1 << 14,), 2.0 * sum(range(50))))


def training(lab: Lab, rank: int, size: int) -> None:
    """DDP with our hook has the parameters of the same training on the host."""
    for mine, theirs in zip(_train(lab, rank), _train(None, rank), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 6))


def _train(lab: Lab | None, rank: int) -> list[Tensor]:
    net: nn.Module = _net()
    state = commlayer.HookState(commlayer.Policy(deterministic=True))
    hook = commlayer.allreduce_hook
    if lab is not None:
        net, hook = lab.model(net), lab.hook(hook)
        lab.stage(state.group())
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=0.002)
    model.register_comm_hook(state, hook)
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
    """DDP with a hook that sums gradients within a group first has the parameters of the same training on the host."""
    found = []
    for net, device in ((lab.model(_net()), lab.device), (_net(), torch.device("cpu"))):
        model = DistributedDataParallel(net, bucket_cap_mb=0.002)
        state = commlayer.HookState(commlayer.Policy(deterministic=True), within=dist.group.WORLD)
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


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        model(torch.randn(8, 20, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def drains(lab: Lab, rank: int, size: int) -> None:
    """Calls for which the driver may drain the device, right after `wait()` and while a rank is late."""
    for number, call in enumerate(lab.drains().values()):
        tensor = lab.tensor(torch.full((1 << 16,), rank + 1.0))
        if rank == number % 2:
            lab.busy(0.1)
        dist.all_reduce(tensor, async_op=True).wait()
        call()
        assert torch.equal(lab.read(tensor), torch.full((1 << 16,), 3.0))


def rooted(lab: Lab, rank: int, size: int) -> None:
    """Broadcast and reduce, in which a rank copies only what it reads or writes."""
    for root in range(size):
        sent, reduced = (lab.tensor(torch.full((4096,), rank + 1.0)) for _ in range(2))
        dist.broadcast(sent, root)
        dist.reduce(reduced, root)
        assert torch.equal(lab.read(sent), torch.full((4096,), root + 1.0))
        if rank == root:
            assert torch.equal(lab.read(reduced), torch.full((4096,), 3.0))


def inference(lab: Lab, rank: int, size: int) -> None:
    """`torch.inference_mode`, whose tensors other threads may not write."""
    with torch.inference_mode():
        tensor = lab.tensor(torch.full((4096,), rank + 1.0))
        dist.all_reduce(tensor)
        assert torch.equal(lab.read(tensor), torch.full((4096,), 3.0))


def default_device(lab: Lab, rank: int, size: int) -> None:
    """A default device, which is not that of pinned memory."""
    tensor = lab.tensor(torch.full((4096,), rank + 1.0))
    with lab.device:
        dist.all_reduce(tensor)
    assert torch.equal(lab.read(tensor), torch.full((4096,), 3.0))


def failure(lab: Lab, rank: int, size: int) -> None:
    """The stream goes on with NaN when an operation fails, and the next call raises the error. Comes last."""
    tensor = lab.tensor(torch.ones(4096))
    store = ranks.store()
    if not waits(lab):
        return
    if rank == 1:
        store.wait(["gone on"])
        dist.distributed_c10d._get_default_group().abort()
        return
    dist.all_reduce(tensor)
    store.set("gone on", "1")
    assert math.isnan(float(lab.read(tensor)[0]))
    try:
        dist.all_reduce(tensor)
    except commlayer.CommError:
        return
    raise AssertionError("the failure was not raised")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        collectives,
        rooted,
        order,
        host_goes_on,
        drains,
        many_in_flight,
        messages,
        memory,
        inference,
        default_device,
        training,
        failure,
    )
}

ON_GPUS: dict[str, Check] = {check.__name__: check for check in (ddp, amp, overlap, within, fsdp, hsdp)}
"""These need a GPU: a fake of one does not order the kernels of a model behind its streams."""


def graph_beside(lab: Lab, rank: int, size: int) -> None:
    """A graph that is captured while an operation is in flight."""
    values, tensor = torch.zeros(1024, device=lab.device), lab.tensor(torch.full((1 << 16,), rank + 1.0))
    values.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    work = dist.all_reduce(tensor, async_op=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        values.add_(1)
    work.wait()
    graph.replay()
    assert torch.equal(lab.read(tensor), torch.full((1 << 16,), 3.0))
    assert float(values[0]) == 2.0


def killed(lab: Lab, rank: int, size: int) -> None:
    """Rank 1 is killed while a stream of rank 0 waits for it, or its `wait()`: rank 0 gets the error."""
    tensor = lab.tensor(torch.ones(4096))
    store = ranks.store()
    if rank == 1:
        store.wait(["called"])
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(tensor, async_op=True)
    store.set("called", "1")
    try:
        work.wait()
        assert math.isnan(float(lab.read(tensor)[0]))
        dist.all_reduce(tensor)
    except commlayer.CommError:
        return
    raise AssertionError("the failure was not raised")


def left(lab: Lab, rank: int, size: int) -> None:
    """The process ends without `destroy_process_group`, and with work in flight on rank 0."""
    tensor = lab.tensor(torch.ones(4096))
    dist.all_reduce(tensor)
    if rank == 0:
        dist.all_reduce(tensor, async_op=True)


UNTIDY: dict[str, Check] = {check.__name__: check for check in (killed, left)}
"""These do not leave the group."""
