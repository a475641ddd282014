"""The measured ranks of bench/against.py: they use torch.distributed, the hook and LocalSteps alone, so that they run
on the package of almost any commit.

    python bench/jobs/against.py TREE                   serves requests from its standard input, on loopback
    python bench/jobs/against.py TREE REQUEST           one rank of an emulated network

TREE comes first on PYTHONPATH; a rank whose package lies elsewhere fails. A request is a JSON object on one line:
`kind` (a key of KINDS), the `arguments` of its function, `ranks`, `environ` and `folder`. Each rank writes what it
found to RANK.json in the folder.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import commlayer  # registers the backend

TIMEOUT = timedelta(seconds=60)

Found = dict[str, Any]
"""`values`, one for each call: seconds or bytes; `cpu_s`: CPU time of this process for one call."""
Join = Callable[[], None]
"""Makes the process group."""


def timed(call: Callable[[], object], iters: int, warmup: int, gap_s: float = 0.0) -> Found:
    """Times `iters` calls after `warmup` discarded ones, each after a pause of `gap_s`."""
    values, start_cpu_s = [], 0.0
    for number in range(warmup + iters):
        if number == warmup:
            start_cpu_s = time.process_time()
        if gap_s:
            time.sleep(gap_s)
        start_s = time.perf_counter()
        call()
        values.append(time.perf_counter() - start_s)
    return {"values": values[warmup:], "cpu_s": (time.process_time() - start_cpu_s) / iters}


def all_reduce(join: Join, size_bytes: int, iters: int, warmup: int, gap_s: float = 0.0) -> Found:
    """Sums of float32. Raises ValueError if one is wrong."""
    join()
    ones = torch.ones(size_bytes // 4)
    values = ones.clone()
    found = timed(lambda: dist.all_reduce(values), iters, warmup, gap_s)
    values.copy_(ones)
    dist.all_reduce(values)
    if not torch.equal(values, ones * dist.get_world_size()):
        raise ValueError(f"rank {dist.get_rank()}: a sum of ones over {dist.get_world_size()} ranks is wrong")
    return found


def all_reduces(join: Join, size_bytes: int, count: int, iters: int, warmup: int) -> Found:
    """`count` sums of float32 at once. Raises ValueError if one is wrong."""
    join()
    tensors = [torch.zeros(size_bytes // 4) for _ in range(count)]

    def all_at_once() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    found = timed(all_at_once, iters, warmup)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    all_at_once()
    for number, tensor in enumerate(tensors):
        if not bool((tensor == (number + 1) * dist.get_world_size()).all()):
            raise ValueError(f"rank {dist.get_rank()}: sum {number} of {count} at once is wrong")
    return found


def reduce_scatter(join: Join, size_bytes: int, iters: int, warmup: int) -> Found:
    """Sums of float32, of which each rank gets its part. Raises ValueError if one is wrong."""
    join()
    world, mine = dist.get_world_size(), 1.0 + dist.get_rank()
    values = torch.full((size_bytes // 4,), mine)
    part = torch.zeros(size_bytes // 4 // world)
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    found = timed(lambda: scatter(part, values), iters, warmup)
    if not bool((part == world * (world + 1) / 2).all()):
        raise ValueError(f"rank {dist.get_rank()}: a part of a sum over {world} ranks is wrong")
    return found


def p2p(join: Join, size_bytes: int, iters: int, warmup: int) -> Found:
    """A message from rank 0 to rank 1, and one back. Raises ValueError if they differ."""
    join()
    mine, its = torch.full((size_bytes // 4,), 1.0 + dist.get_rank()), torch.zeros(size_bytes // 4)

    def there_and_back() -> None:
        if dist.get_rank() == 0:
            dist.send(mine, 1)
            dist.recv(its, 1)
        else:
            dist.recv(its, 0)
            dist.send(mine, 0)

    found = timed(there_and_back, iters, warmup)
    if not torch.equal(its, torch.full_like(its, 2.0 - dist.get_rank())):
        raise ValueError(f"rank {dist.get_rank()}: a message arrived with other values")
    return found


def layers(width: int, count: int) -> nn.Sequential:
    """A model that is the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)))


def ddp(join: Join, width: int, iters: int, warmup: int, codec: str = "") -> Found:
    """A step of DDP: 8 layers of width x width, float32. With a codec, by the hook."""
    join()
    model = DistributedDataParallel(layers(width, 8), bucket_cap_mb=1)
    if codec:
        model.register_comm_hook(commlayer.HookState(commlayer.Policy(codec=codec)), commlayer.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    values = torch.randn(8, width)

    def step() -> None:
        optimizer.zero_grad()
        model(values).square().mean().backward()
        optimizer.step()

    return timed(step, iters, warmup)


def exact(join: Join, width: int, iters: int, warmup: int) -> Found:
    """An exact step of LocalSteps: 8 layers of width x width, float32. Raises ValueError if it averages wrongly."""
    join()
    model, alone = layers(width, 8), layers(width, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    values = torch.randn(8, width) + dist.get_rank()

    def step() -> None:
        optimizer.zero_grad()
        model(values).square().mean().backward()
        optimizer.step()

    with commlayer.LocalSteps(model, optimizer, 8, exact_steps=warmup + iters + 1):
        found = timed(step, iters, warmup)
        alone(values).square().mean().backward()
        for averaged, own in zip(model.parameters(), alone.parameters(), strict=True):
            assert averaged.grad is not None  # for mypy: the model uses all its parameters
            assert own.grad is not None
            dist.all_reduce(own.grad)
            total = own.grad.norm()
            if not total > 0 or (averaged.grad * dist.get_world_size() - own.grad).norm() > 1e-3 * total:
                raise ValueError(f"rank {dist.get_rank()}: an exact step did not average a gradient")
    return found


def pipeline(join: Join, width: int, iters: int, warmup: int) -> Found:
    """A step of torch's 1F1B: a stage of 4 layers on each rank, 8 micro-batches of 16 rows."""
    join()
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(layers(width, 4), rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 8, loss_fn=lambda found, wanted: (found - wanted).square().mean())
    values = torch.randn(128, width)

    def step() -> None:
        if rank == 0:
            schedule.step(values)
        else:
            schedule.step(target=values)

    return timed(step, iters, warmup)


def start(join: Join) -> Found:
    """The start of a job: from the call of init_process_group to the first sum."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    join()
    dist.all_reduce(torch.ones(1))
    return {"values": [time.perf_counter() - start_s], "cpu_s": time.process_time() - start_cpu_s}


def memory(join: Join, size_bytes: int, iters: int) -> Found:
    """The bytes by which the peak of a process grows in a job that reduces two tensors at once."""
    before, start_cpu_s = resident("VmRSS"), time.process_time()
    join()
    tensors: list[Tensor] = [torch.ones(size_bytes // 4) for _ in range(2)]
    for _ in range(iters):
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            assert work is not None  # for mypy: it is None only outside the group
            work.wait()
    return {"values": [resident("VmHWM") - before], "cpu_s": (time.process_time() - start_cpu_s) / iters}


def resident(name: str) -> int:
    """A size of this process from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


KINDS: dict[str, Callable[..., Found]] = {
    case.__name__: case for case in (all_reduce, all_reduces, reduce_scatter, p2p, ddp, exact, pipeline, start, memory)
}


def joined(rank: int, size: int, address: str, port: int, listener: socket.socket | None = None) -> None:
    """Makes the group. `listener`: the bound socket of rank 0's Store."""
    descriptor = None if listener is None or rank else listener.detach()
    store = dist.TCPStore(address, port, size, rank == 0, TIMEOUT, master_listen_fd=descriptor)
    dist.init_process_group("commlayer", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def run(request: Mapping[str, Any], rank: int, join: Join) -> None:
    """One rank of a request. Ends the group together with the others."""
    torch.set_num_threads(1)
    found = KINDS[request["kind"]](join, **request["arguments"])
    dist.barrier()
    Path(request["folder"], f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def fork_ranks(request: Mapping[str, Any]) -> list[int]:
    """Runs a request in forked ranks, which need not import torch again; returns the ranks that failed."""
    size = request["ranks"]
    listener = socket.create_server(("127.0.0.1", 0), backlog=size)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.environ.update(request["environ"])
                run(request, rank, partial(joined, rank, size, "127.0.0.1", listener.getsockname()[1], listener))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    listener.close()
    return [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]


def main() -> None:
    """Raises RuntimeError if the package is not that of the tree."""
    tree = Path(sys.argv[1]).resolve()
    package = Path(commlayer.__file__).resolve()
    if package.parent != tree / "commlayer":
        raise RuntimeError(f"the package comes from {package}, not from {tree}: set PYTHONPATH={tree}")
    if len(sys.argv) > 2:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        request = json.loads(sys.argv[2])
        os.environ.update(request["environ"])
        run(request, rank, partial(joined, rank, size, address, port))
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a rank that prints does not answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(fork_ranks(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
