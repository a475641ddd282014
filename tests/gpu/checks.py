"""The checks. Each is called on two ranks of a job, with the device of the rank; an AssertionError is its failure."""

import contextlib
import functools
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commlayer
from tests import ranks
from tests.gpu import training
from tests.gpu.lab import Lab, waits

Check = Callable[[Lab, int, int], None]

PROGRAMS = 20


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
    tensors = [lab.tensor(torch.full((1 + 997 * length,), length + rank + 0.0)) for length in range(100)]
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


def programs(lab: Lab, rank: int, size: int) -> None:
    """Random programs of operations, waits, kernels and calls that drain the device have the bits of the host."""
    for seed in range(PROGRAMS):
        on_device = [lab.read(values) for values in _program(seed, rank, lab.tensor, lab.launch, lab.drains())]
        on_host = _program(seed, rank, torch.clone, lambda kernel: kernel(), {})
        for mine, theirs in zip(on_device, on_host, strict=True):
            assert torch.equal(mine.reshape(-1), theirs.reshape(-1)), (seed, mine, theirs)


def _program(
    seed: int,
    rank: int,
    place: Callable[[Tensor], Tensor],
    launch: Callable[[Callable[[], object]], object],
    drains: dict[str, Callable[[], object]],
) -> list[Tensor]:
    """Runs one on both ranks, with pauses and drains of their own; returns its tensors."""
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    held = [place(torch.arange(float(shared.choice((1, 17, 4096, 1 << 18)))) + rank) for _ in range(3)]
    works: dict[int, Any] = {}
    calls: list[Callable[[], object]] = [*drains.values(), lambda: None]

    def settle(at: int) -> None:
        if at in works:
            works.pop(at).wait()

    for _ in range(shared.randint(8, 24)):
        at, choice, root = shared.randrange(3), shared.choice("rrrbbwwkkd"), shared.randrange(2)
        time.sleep(own.choice((0, 0, 0.002)))
        if choice == "d":
            own.choice(calls)()
            continue
        settle(at)
        if choice == "k":
            launch(functools.partial(held[at].mul_, 0.5))
        elif choice in "rb":
            broadcast = functools.partial(dist.broadcast, src=root)
            asked: Callable[..., Any] = broadcast if choice == "b" else dist.all_reduce
            works[at] = asked(held[at], async_op=True)
    for at in range(3):
        settle(at)
    return held


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


def threads(lab: Lab, rank: int, size: int) -> None:
    """Two threads, each with a group and a stream of its own.

    Where streams wait they take turns, in one order on both ranks: see "Deadlocks" in docs/cuda.md.
    """
    groups = [dist.new_group() for _ in range(2)]
    turn, takes_turns = threading.Condition(), waits(lab)
    done = [0, 0]
    faults: list[BaseException] = []

    def add(number: int) -> None:
        with lab.accelerator.on(lab.accelerator.side_stream(lab.device)):
            for _ in range(20):
                tensor = lab.tensor(torch.full((4096,), rank + number + 1.0))
                with turn if takes_turns else contextlib.nullcontext():
                    if takes_turns:
                        assert turn.wait_for(lambda: faults or done[0] == done[1] + number, 30)
                    dist.all_reduce(tensor, group=groups[number])
                    if takes_turns:
                        done[number] += 1
                        turn.notify_all()
                assert torch.equal(lab.read(tensor), torch.full((4096,), 2.0 * number + 3.0))

    def guarded(number: int) -> None:
        try:
            add(number)
        except BaseException as error:
            faults.append(error)

    for group in groups:
        lab.stage(group)
    both = [threading.Thread(target=guarded, args=(number,)) for number in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    if faults:
        raise faults[0]


def late(lab: Lab, rank: int, size: int) -> None:
    """A rank never calls: the other one gets the error after the timeout of the group."""
    group = dist.new_group()
    lab.stage(group)
    store = ranks.store()
    if rank == 1:
        store.wait(["told"])
        return
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    tensor = lab.tensor(torch.ones(4096))
    try:
        dist.all_reduce(tensor, group=group)
        assert math.isnan(float(lab.read(tensor)[0]))
        dist.all_reduce(tensor, group=group)
    except commlayer.OperationTimeoutError:
        return
    finally:
        store.set("told", "1")
    raise AssertionError("the timeout was not raised")


def failure(lab: Lab, rank: int, size: int) -> None:
    """Rank 1 aborts in mid-wait: `wait()` raises it, or the next call, if the stream waited: it went on with NaN.

    Comes last.
    """
    tensor = lab.tensor(torch.ones(4096))
    store = ranks.store()
    if rank == 1:
        store.wait(["called"])
        dist.distributed_c10d._get_default_group().abort()
        return
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if waits(lab):
        work.wait()
    store.set("called", "1")
    try:
        if waits(lab):
            assert math.isnan(float(lab.read(tensor)[0]))
            dist.all_reduce(tensor)
        else:
            work.wait()
    except commlayer.CommError:
        return
    raise AssertionError("the failure was not raised")


def beside_nccl(lab: Lab, rank: int, size: int) -> None:
    """Groups as in docs/cuda.md: tensors of the host through commlayer, those of the GPU by NCCL.

    Each has one rank, as NCCL takes no two on one GPU.
    """
    backend = "cpu:commlayer,cuda:nccl" if lab.device.type == "cuda" else "commlayer"
    groups = [dist.new_group([rank], backend=backend) for rank in range(size)]
    for tensor in (lab.tensor(torch.ones(4096)), torch.ones(4096)):
        dist.all_reduce(tensor, group=groups[rank])
        dist.broadcast(tensor, rank, group=groups[rank])
        assert torch.equal(lab.read(tensor), torch.ones(4096))


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
        programs,
        inference,
        default_device,
        training.hook,
        threads,
        late,
        failure,
    )
}
ON_GPUS: dict[str, Check] = {check.__name__: check for check in (*training.ON_GPUS, beside_nccl)}
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
