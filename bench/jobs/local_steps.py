"""What bench.local_steps trains: layers whose computation is a sleep, with DDP or with local steps.

Each rank runs `train` for a job. A host is a site; with several ranks per host, DDP averages within it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.harness import turns
from bench.harness.turns import Log
from bench.jobs import training
from bench.jobs.data_parallel import LAYERS, Layer
from bench.jobs.torchft_sites import torchft_of
from bench.jobs.training import interface_bytes
from commlayer.tools.bench.cpu import CpuTime

WIDTH = 366
"""As many values as the GPT of docs/training.md has: 1.07 million."""
STEP_S = 0.056
"""The computation of a step, as that of the GPT: a third is the forward pass."""
BUCKET_MB = 1.0
STALL_EVERY = 80


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of one system."""

    system: str
    """Its name in the tables."""
    backend: str = "commlayer"
    tcp_cc: str | None = None
    bits: str = "f32"
    """As of training.Job."""
    policy: dict[str, Any] | None = None
    """Policy of commlayer's hook, or of exact steps of LocalSteps; None, with this backend: no hook."""
    local: dict[str, Any] | None = None
    """Arguments of LocalSteps; None: DDP."""
    period: int = 0
    """H of torch's PeriodicModelAverager, which averages the weights, as LocalSGD, or of `torchft`; 0: gradients are
    averaged."""
    torchft: str = ""
    """The class of torchft that averages."""
    is_alone: bool = False
    """Whether nothing is averaged: the computation alone."""
    warm_up: int = 4
    """With local steps, before a round of H that is not measured either."""
    steps: int = 6
    """Measured steps, at least: with local steps, whole rounds of H."""
    step_s: float = STEP_S
    """The sleep of a step."""
    ranks_per_host: int = 1
    speeds: tuple[float, ...] = ()
    """The ranks' speeds; empty: all have the same."""
    is_free: bool = False
    """Whether the ranks make as many steps as they can, until all together have made `steps` of them."""
    stall_s: float = 0.0
    """So long the last rank does not compute, every `STALL_EVERY` of its steps."""


def sleeper(step_s: float) -> nn.Sequential:
    """A model whose steps take so long."""
    torch.manual_seed(1)
    return nn.Sequential(*(Layer(WIDTH, step_s / 3 / LAYERS) for _ in range(LAYERS)))


def groups_of(ranks_per_host: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group of this rank's site, and that of the ranks of the same number in all sites. None: a site is a rank."""
    if ranks_per_host == 1:
        return None, None
    rank, world = dist.get_rank(), dist.get_world_size()
    sites = [dist.new_group(list(range(at, at + ranks_per_host))) for at in range(0, world, ranks_per_host)]
    peers = [dist.new_group(list(range(at, world, ranks_per_host))) for at in range(ranks_per_host)]
    return sites[rank // ranks_per_host], peers[rank % ranks_per_host]


def model_of(job: Job, site: dist.ProcessGroup | None) -> nn.Module:
    """A plain module where no gradients are averaged."""
    net = sleeper(job.step_s)
    if (job.local is not None and site is None) or job.period or job.is_alone:
        return net
    return DistributedDataParallel(net, process_group=site, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)


def hooked(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> commlayer.HookState | None:
    """Registers the hook of a job with DDP, and returns the state of commlayer's."""
    if job.local is not None or not isinstance(model, DistributedDataParallel):
        return None
    if job.backend == "commlayer" and job.policy is None:
        return None
    as_training = training.Job(job.system, job.backend, job.tcp_cc, job.bits, job.policy)
    state, hook = training.hook_of(as_training, model.module, optimizer)
    if hook is not None:
        model.register_comm_hook(state, hook)
    return state if isinstance(state, commlayer.HookState) else None


@contextlib.contextmanager
def local_of(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, peers: dist.ProcessGroup | None
) -> Iterator[commlayer.LocalSteps | None]:
    """A context with the local steps of a job."""
    if job.torchft:
        assert isinstance(model, nn.Sequential)  # for mypy
        with torchft_of(job.torchft, job.period, model, optimizer):
            yield None
        return
    if job.local is None:
        yield None
        return
    policy = None if job.policy is None else commlayer.Policy(**job.policy)
    with commlayer.LocalSteps(model, optimizer, group=peers, policy=policy, **job.local) as local:
        yield local


def train(job: Job) -> Log:
    """Seconds and bytes of each step, and the words of `explain`. Bytes are those that this host sent."""
    if job.speeds:
        job = dataclasses.replace(job, step_s=job.step_s / job.speeds[dist.get_rank()])
    site, peers = groups_of(job.ranks_per_host)
    model = model_of(job, site)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = hooked(job, model, optimizer)
    averager = PeriodicModelAverager(job.period) if job.period and not job.torchft else None
    inputs = torch.randn(2, WIDTH)
    counts = []
    numbers = itertools.count(1)

    def step() -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and next(numbers) % STALL_EVERY == 0:
            time.sleep(job.stall_s)
        counts.append(interface_bytes())
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if averager is not None:
            averager.average_parameters(model.parameters())

    with local_of(job, model, optimizer, peers) as local:
        for _ in range(job.warm_up):
            step()
        every = job.period or (1 if local is None else every_of(local))
        counts.clear()
        if job.speeds or job.is_free:
            assert local is not None  # for mypy
            return _trained(local, step, job.steps)
        log = turns.timed(step, every, -(-job.steps // every) * every, trace=False)
        counts.append(interface_bytes())
        words = "" if local is None else local.explain()
    dist.barrier()
    return {
        **log,
        "step_s": [round(seconds, 5) for seconds in log["step_s"]],
        "sent_bytes": round((counts[-1] - counts[every]) / len(log["step_s"])),
        "every": every,
        "words": words or ("" if state is None else state.explain()),
    }


def _trained(local: commlayer.LocalSteps, step: Callable[[], None], steps: int) -> Log:
    """Seconds per step of any site, while sites of unequal speed train `steps` of them; and the part of this rank."""
    first = local.trained
    while local.trained == first:  # until a sync
        step()
    first, own, begin_s, begin_cpu = local.trained, local.steps, time.perf_counter(), CpuTime.now()
    while local.trained < first + steps:
        step()
    seconds, trained = time.perf_counter() - begin_s, local.trained - first
    used = turns.busy(CpuTime.now() - begin_cpu, seconds)
    return {"step_s": [seconds / trained], **used, "own": (local.steps - own) / trained}


def every_of(local: commlayer.LocalSteps) -> int:
    """H; 1 in exact steps."""
    found = local.state_dict()["turns"]
    return 1 if found is None else int(found[0])
