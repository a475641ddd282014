"""Figures of this GPU: copies, words, collectives, and steps of training beside gloo."""

import functools
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.device.accelerator import current, write_word
from commlayer.frontend.device.driver import DriverError

ROUNDS = 5
MIB = 1 << 20


def _median_s(body: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median time of a call with all its work on the device, in seconds; one call before does not count."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begun_s = time.monotonic()
        body()
        torch.cuda.synchronize()
        times.append(time.monotonic() - begun_s)
    return statistics.median(times[1:])


def copies(rank: int, size: int) -> dict[str, float]:
    """GB/s to and from pinned memory, of rank 0 alone; microseconds from a word to the end of a kernel behind it."""
    if rank != 0:
        return {}
    nbytes = 64 * MIB
    on_device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    found = {
        "d2h_gb_per_s": nbytes / _median_s(lambda: on_host.copy_(on_device, non_blocking=True)) / 1e9,
        "h2d_gb_per_s": nbytes / _median_s(lambda: on_device.copy_(on_host, non_blocking=True)) / 1e9,
    }
    on_device[:1].add_(1)  # loads the kernel: the driver does that only once the device is idle
    latencies = []
    for _ in range(20):
        word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        ended = torch.cuda.Event()
        try:
            current().wait_word(torch.cuda.current_stream(), word)
        except DriverError:
            return found
        on_device[:1].add_(1)
        ended.record()
        time.sleep(0.002)
        begun_s = time.monotonic()
        write_word(word)
        while not ended.query():
            pass
        latencies.append(1e6 * (time.monotonic() - begun_s))
    return found | {"word_to_kernel_us": statistics.median(latencies)}


def all_reduce(rank: int, size: int) -> dict[str, float]:
    """Milliseconds of an all-reduce with `wait()` and all copies, by bytes."""
    found = {}
    for nbytes in (4 << 10, 64 << 10, MIB, 16 * MIB, 256 * MIB):
        tensor = torch.zeros(nbytes // 4, device="cuda")
        found[f"all_reduce_{nbytes}_ms"] = 1e3 * _median_s(functools.partial(dist.all_reduce, tensor), 3)
    return found


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))).cuda()


def _step(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 1024, device="cuda")

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(rank: int, size: int) -> dict[str, float]:
    """Milliseconds of a step of 12 million parameters."""
    return {"ddp_step_ms": 1e3 * _median_s(_step(DistributedDataParallel(_net())))}


def hook(rank: int, size: int) -> dict[str, float]:
    """Milliseconds of the same step with our hook, by codec."""
    found = {}
    for codec in ("none", "int8"):
        model = DistributedDataParallel(_net(), gradient_as_bucket_view=True)
        model.register_comm_hook(commlayer.HookState(commlayer.Policy(codec=codec)), commlayer.allreduce_hook)
        found[f"hook_{codec}_step_ms"] = 1e3 * _median_s(_step(model))
    return found


def fsdp(rank: int, size: int) -> dict[str, float]:
    """The most memory of the device that a step of FSDP2 takes, in MiB, and its milliseconds."""
    net = _net()
    mesh = init_device_mesh("cuda", (size,))
    for layer in net.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    step = _step(net)
    step()
    torch.cuda.reset_peak_memory_stats()
    step_ms = 1e3 * _median_s(step)
    return {"fsdp_peak_mib": torch.cuda.max_memory_allocated() / MIB, "fsdp_step_ms": step_ms}


def contexts(rank: int, size: int) -> dict[str, float]:
    """GPUs on which this process has a context, as nvidia-smi says. More than one: a thread has left one."""
    dist.all_reduce(torch.ones(1024, device="cuda"))
    torch.cuda.synchronize()
    asked = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    mine = [line for line in said.splitlines() if line.split(",")[0].strip() == str(os.getpid())]
    return {"contexts": float(len(mine))} if mine else {}  # in a container it may see no processes


FIGURES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    figure.__name__: figure for figure in (copies, all_reduce, ddp, hook, fsdp, contexts)
}
BESIDE_GLOO = ("all_reduce", "ddp", "fsdp")
BY_MODE = ("hook",)
"""Those that gloo cannot do."""
