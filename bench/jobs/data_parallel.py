"""What bench.overlap trains with DDP: layers whose computation is a sleep, and the systems that reduce their gradients.

Each rank runs `train` for a system, and `measure_costs` for the model's input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.harness import turns
from bench.harness.turns import Accelerator, Log
from bench.jobs import ddp_model
from bench.jobs.dear import Dear
from commlayer.frontend.overlap import ddp as overlap_ddp
from commlayer.frontend.overlap.ddp import DdpOverlap
from commlayer.scheduler.measure import line

LAYERS = 8
FORWARD_S = 0.025
"""The forward pass of a layer, on links that are not slowed down; its backward pass takes twice as long."""
WARM_UP_STEPS, STEPS = 3, 6

GLOO, STOCK, OURS = "DDP, gloo", "DDP, commlayer", "overlap"
HOOKS, FIFO = "overlap's hooks, gloo", "overlap, one class"
DEAR_GLOO, DEAR = "DeAR, gloo", "DeAR, one class"
SYSTEMS = {
    GLOO: "step",
    STOCK: "step",
    DEAR_GLOO: "dear",
    DEAR: "dear",
    HOOKS: "fifo",
    FIFO: "fifo",
    OURS: "class",
}
"""The systems by name, as `ddp_model.predict` has them."""
ON_GLOO = (GLOO, DEAR_GLOO, HOOKS)
COSTS_GLOO, COSTS = "costs, gloo", "costs, commlayer"
"""The jobs that measure the model's input."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of one system."""

    system: str
    layers_per_bucket: int = 1
    tcp_cc: str | None = None
    steps: int = STEPS
    forward_s: float = FORWARD_S
    trace: bool = False

    @property
    def backend(self) -> str:
        return "gloo" if self.system in (*ON_GLOO, COSTS_GLOO) else "commlayer"


class Layer(nn.Module):
    def __init__(self, width: int, forward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.forward_s = forward_s

    def forward(self, values: Tensor) -> Tensor:
        computed: Tensor = Accelerator.apply(torch.tanh(self.linear(values)), self.forward_s)  # type: ignore[no-untyped-call]
        return computed


def reduce_on_gloo(buffer: Tensor, *_: Any, **__: Any) -> Future[Tensor]:
    """Averages a bucket as `overlap` does it, in an all-reduce of gloo. It replaces `reduce_bucket`."""
    work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
    assert work is not None
    future: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def reduce_nothing(buffer: Tensor, *_: Any, **__: Any) -> Future[Tensor]:
    """Replaces `reduce_bucket`: the gradients stay this rank's own."""
    future: Future[Tensor] = Future()
    future.set_result(buffer)
    return future


@contextlib.contextmanager
def hooks_of(
    system: str,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    reduce: Callable[..., Future[Tensor]] | None = None,
) -> Iterator[DdpOverlap | None]:
    """A context in which gradients travel as the system has it. `reduce` replaces its reduction of a bucket."""
    if system in (GLOO, STOCK):
        if reduce is not None:
            model.register_comm_hook(reduce, lambda given, bucket: given(bucket.buffer()))
        yield None
        return
    dear = Dear()
    own = {HOOKS: reduce_on_gloo, DEAR_GLOO: dear.reduce, DEAR: dear.reduce}.get(system)
    reduce = reduce or own
    replaced = mock.patch.object(overlap_ddp, "reduce_bucket", reduce) if reduce else contextlib.nullcontext()
    with replaced:
        handle = commlayer.overlap(model, optimizer)
        handle.by_next_use = system == OURS
        model.register_forward_pre_hook(lambda *_: dear.gather(), prepend=True)
        yield handle
        dear.gather()
        handle.remove()


def model_of(job: Job, width: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    layer_mb = 4 * width * width / (1 << 20)
    model = DistributedDataParallel(
        nn.Sequential(*(Layer(width, job.forward_s) for _ in range(LAYERS))),
        gradient_as_bucket_view=True,
        bucket_cap_mb=layer_mb * (job.layers_per_bucket - 0.1),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(job: Job, width: int) -> Log:
    """Seconds of each step, the busy share of the machine's CPU, and the part of it that such ranks charge."""
    model, optimizer = model_of(job, width)
    inputs = torch.randn(2, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    with hooks_of(job.system, model, optimizer):
        log = turns.timed(step, WARM_UP_STEPS, job.steps, trace=job.trace)
    dist.barrier()
    return {**log, "spans": turns.spans_of_ranks()} if job.trace else log


def computing(job: Job, width: int, system: str) -> ddp_model.Compute:
    """The computing of a step in which nothing is reduced, with the hooks of a system."""
    model, optimizer = model_of(job, width)
    inputs, seconds = torch.randn(2, width), list[tuple[float, ...]]()
    with hooks_of(system, model, optimizer, reduce_nothing):
        for _ in range(WARM_UP_STEPS + job.steps):
            moments = [time.perf_counter()]
            loss = model(inputs).square().mean()
            moments.append(time.perf_counter())
            loss.backward()
            moments.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            moments.append(time.perf_counter())
            seconds.append(tuple(end - start for start, end in pairwise(moments)))
    return ddp_model.Compute(*(statistics.median(column) for column in zip(*seconds[WARM_UP_STEPS:], strict=True)))


def measure_costs(job: Job, width: int) -> Log:
    """The model's input, each part by itself: computation without reductions, all-reduces without computation."""
    plain, deferred = (computing(job, width, system) for system in (STOCK, OURS))
    samples = dict[int, list[float]]()
    ranks = dist.get_world_size()
    for count in (1, 4):
        buffer = torch.ones(count * width * width)
        sent = int(2 * (ranks - 1) / ranks * buffer.nbytes)
        samples[sent] = [reduction_s(buffer) for _ in range(1 + job.steps)][1:]  # the first makes connections
    latency_s, seconds_per_byte = line(samples)
    bucket_s = min(samples) * seconds_per_byte
    class_s, class_latency_s = bucket_s, latency_s
    if job.system == COSTS:
        urgent_s, all_s = zip(*(beside_bulk_s(width * width, 3, bucket_s / 2) for _ in range(job.steps)), strict=True)
        class_s = max((statistics.median(all_s) - latency_s) / 4, bucket_s)
        class_latency_s = max(statistics.median(urgent_s) - class_s, latency_s)
    costs = ddp_model.Costs(plain, deferred, LAYERS * bucket_s, latency_s, LAYERS * class_s, class_latency_s)
    return {"step_s": [0.0], "busy": 0.0, "of_ranks": 0.0, "costs": dataclasses.asdict(costs)}


def beside_bulk_s(values: int, bulk: int, after_s: float) -> tuple[float, float]:
    """Seconds of an urgent all-reduce that starts `after_s` after less urgent ones, and of all of them together."""
    buffers = [torch.ones(values) for _ in range(bulk + 1)]
    dist.barrier()
    start_s = time.perf_counter()
    with commlayer.priority(4):
        works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers[1:]]
    time.sleep(after_s)
    urgent_start_s = time.perf_counter()
    with commlayer.priority(1):
        dist.all_reduce(buffers[0])
    urgent_s = time.perf_counter() - urgent_start_s
    for work in works:
        assert work is not None
        work.wait()
    return urgent_s, time.perf_counter() - start_s


def reduction_s(buffer: Tensor) -> float:
    """Seconds of an all-reduce that all ranks start at once."""
    dist.barrier()
    start_s = time.perf_counter()
    dist.all_reduce(buffer)
    return time.perf_counter() - start_s
