"""`commlayer.priority` and `Work.times` in jobs: collectives that the context reaches, and the order they end in."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

import commlayer
from commlayer.frontend.work.context import ORDER_MAX, in_order
from tests import fake_transport, ranks
from tests.fake_transport import on_fake


def classes() -> set[int]:
    """The classes of the operations since the last call of this."""
    world: Any = dist.group.WORLD
    fake: fake_transport.FakeGroup = world._native
    found = {priority for _, _, priority in fake.operations}
    fake.operations.clear()
    return found


def call_everything(rank: int, size: int) -> None:
    world: Any = dist.group.WORLD
    tensor, whole = torch.ones(4), torch.ones(4 * size)
    for async_op in (False, True):
        works: list[Any] = [
            dist.all_reduce(tensor, async_op=async_op),
            dist.broadcast(tensor, 0, async_op=async_op),
            dist.reduce(tensor, 0, async_op=async_op),
            dist.all_gather_into_tensor(whole, tensor, async_op=async_op),
            dist.reduce_scatter_tensor(tensor, whole, async_op=async_op),
            dist.all_gather(list(whole.chunk(size)), tensor, async_op=async_op),
            dist.all_to_all_single(whole, whole.clone(), async_op=async_op),
            dist.gather(tensor, list(whole.chunk(size)) if rank == 0 else None, 0, async_op=async_op),
            dist.scatter(tensor, list(whole.chunk(size)) if rank == 0 else None, 0, async_op=async_op),
            dist.barrier(async_op=async_op),
        ]
        for work in works:
            if work is not None:
                work.wait()
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    assert funcol.all_reduce(tensor, "sum", world) is not None
    mesh = DeviceMesh("cpu", list(range(size)))
    DTensor.from_local(tensor, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local().sum().item()


@ranks.on(2, on_fake)
def test_the_context_reaches_every_collective(rank: int, size: int) -> None:
    call_everything(rank, size)
    assert classes() == {4}
    with commlayer.priority(1):
        call_everything(rank, size)
    assert classes() == {1}


@ranks.on(2, on_fake)
def test_an_explicit_policy_counts_more_than_the_context(rank: int, size: int) -> None:
    world: Any = dist.group.WORLD
    with commlayer.priority(1):
        world.allreduce([torch.ones(4)], policy=commlayer.Policy(priority=6)).wait()
        assert classes() == {6}
        world.allreduce([torch.ones(4)]).wait()
        assert classes() == {1}


@ranks.on(2, on_fake)
def test_an_order_reaches_asynchronous_collectives(rank: int, size: int) -> None:
    world: Any = dist.group.WORLD
    world._native.orders.clear()
    for place in (0, 3, 1 << 20):
        with in_order(place):
            dist.all_reduce(torch.ones(4), async_op=True).wait()
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    assert world._native.orders == [0, 3, ORDER_MAX, 0]


@ranks.on(2, on_fake)
def test_backward_of_a_collective_runs_in_the_context(rank: int, size: int) -> None:
    leaf = torch.ones(4, requires_grad=True)
    world = dist.group.WORLD
    assert world is not None
    gathered = funcol.all_gather_tensor_autograd(leaf, 0, world)
    assert classes() == {4}
    with commlayer.priority(2):
        gathered.sum().backward()
    assert classes() == {2}


def on_all_ranks(overtakes: Callable[[], bool]) -> bool:
    """Whether it is so on all ranks in one of some tries: on a busy machine a rank may submit the second operation when
    the first one is over."""
    for _ in range(5):
        does = torch.tensor(float(overtakes()))
        dist.all_reduce(does, op=dist.ReduceOp.MIN)
        if does:
            return True
    return False


@ranks.on(2, ranks.run_job)
def test_an_urgent_all_reduce_overtakes_bulk_of_its_group(rank: int, size: int) -> None:
    def overtakes() -> bool:
        bulk, urgent = torch.ones(32 << 20), torch.ones(16 << 10)
        dist.barrier()
        start_s = time.monotonic()
        with commlayer.priority(7):
            works: list[Any] = [dist.all_reduce(bulk, async_op=True)]
        with commlayer.priority(0):
            works.append(dist.all_reduce(urgent, async_op=True))
        in_flight = works[0].times() is None
        for work in works:
            work.wait()
        assert bulk[-1] == urgent[-1] == size
        slow, fast = (work.times() for work in works)
        assert start_s <= slow.submitted_s <= slow.first_byte_s <= slow.ended_s <= time.monotonic()
        assert slow.submitted_s <= fast.submitted_s <= fast.first_byte_s <= fast.ended_s
        return bool(in_flight and fast.ended_s < slow.ended_s)

    assert on_all_ranks(overtakes)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_within_a_class_the_operation_needed_first_overtakes(rank: int, size: int) -> None:
    def overtakes() -> bool:
        bulk, needed_first = torch.ones(16 << 20), torch.ones(16 << 10)
        dist.barrier()
        works: list[Any] = []
        for tensor, place in ((bulk, 2), (needed_first, 1)):
            with in_order(place):
                works.append(dist.all_reduce(tensor, async_op=True))
        for work in works:
            work.wait()
        assert bulk[-1] == needed_first[-1] == size
        slow, fast = (work.times() for work in works)
        assert slow.submitted_s <= fast.submitted_s <= fast.ended_s
        return bool(fast.ended_s < slow.ended_s)

    assert on_all_ranks(overtakes)
