"""Measured training jobs: each rank runs a list of jobs, one after another, and rank 0 writes their logs.

    commlayer emulate loss1_100 -- python -m bench.jobs.training jobs.json logs.jsonl

The model and the text are those of examples/train_gpt.py. Every 16th stretch of the text is held out for validation.
The ranks run all jobs, so that torch is loaded once; each job has its own process group, connections and seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.harness.driver import BenchError
from bench.harness.options import options
from commlayer.tools.bench.papers import policy_of
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.ranks import run, terminable
from commlayer.tools.emulate.scenario import Scenario
from commlayer.tools.emulate.stress import Stress
from examples.train_gpt import Gpt, draw_batch, parameters_digest, standard_library_text

ROOT = Path(__file__).parents[2]
TCP_CC = Path("/proc/sys/net/ipv4/tcp_congestion_control")
STRETCH_BYTES = 16 << 10
HELD_OUT_EVERY = 16
WARM_UP_STEPS = 3
"""Steps left out of the medians: DDP rebuilds its buckets after the first one."""
CALIBRATE_EVERY = 10
STORE_TIMEOUT = timedelta(seconds=120)
JOB_LIMIT_S = 300.0
"""A rank whose job takes longer prints its stack and ends, which ends the other ranks."""

Log = dict[str, Any]
"""The log of a job: `job`, `step_s`, `validations` (step, seconds of training, loss) and overall figures."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run: its backend and its model."""

    system: str
    """Its name in the tables."""
    backend: str = "commlayer"
    tcp_cc: str | None = None
    """TCP congestion control of gloo's connections; None: the machine's default."""
    bits: str = "f32"
    """Gradients on the network, by PyTorch's hooks: f32, f16, bf16, or gloo's powersgd:RANK:BEGIN, in f16 after
    BEGIN steps, 2 at least."""
    policy: dict[str, Any] | None = None
    """Policy of commlayer's hook."""
    bucket_mb: float = 25.0
    """DDP's bucket_cap_mb, of 32-bit gradients."""
    seed: int = 1
    steps: int = 100
    validate_every: int = 0
    """Steps between validations; 0: only after the last step."""
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    batch: int = 4
    """Windows per rank and step."""
    validation_batch: int = 64
    """Windows per rank and validation."""
    optimizer: str = "AdamW"
    """A class of torch.optim; SGD has momentum 0.9."""
    learning_rate: float = 3e-3
    """Highest learning rate: it rises over the first 5 % of the steps, then falls to 0 as a cosine."""
    overlap: bool = False
    """Whether gradients travel during the next forward pass; only with commlayer and `bits` f32."""
    local: dict[str, Any] | None = None
    """Arguments of LocalSteps, which then averages instead of DDP: each rank is a site."""


def interface_bytes() -> int:
    """Bytes that the network interfaces of this namespace have sent, as the kernel counts them."""
    counters = Path("/sys/class/net").glob("*/statistics/tx_bytes")
    return sum(int(counter.read_text()) for counter in counters if counter.parts[4] != "lo")


def learning_rate_share(step: int, steps: int) -> float:
    """Share of the highest learning rate at a step."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def hold_out(text: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a text: training text, and every HELD_OUT_EVERY-th stretch for validation."""
    stretches = text.split(STRETCH_BYTES)
    held = [stretch for i, stretch in enumerate(stretches) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    kept = [stretch for i, stretch in enumerate(stretches) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return torch.cat(kept), torch.cat(held)


def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the job."""
    options = {"momentum": 0.9} if job.optimizer == "SGD" else {}
    made: torch.optim.Optimizer = getattr(torch.optim, job.optimizer)(model.parameters(), job.learning_rate, **options)
    return made


def hook_of(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Callable[..., Any] | None]:
    """The state and the hook to register, if any. PyTorch's hooks make the 16-bit types."""
    if job.backend == "commlayer":
        fine = commlayer.Fine(model)
        state = commlayer.HookState(policy_of(job.policy or {}), fine=fine, optimizer=optimizer)
        wrappers = {"f16": default_hooks.fp16_compress_wrapper, "bf16": default_hooks.bf16_compress_wrapper}
        hook: Callable[..., Any] = commlayer.allreduce_hook
        return state, _renamed(wrappers[job.bits](hook)) if job.bits in wrappers else hook
    if job.bits.startswith("powersgd:"):
        rank, begin = map(int, job.bits.split(":")[1:])
        powers = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=begin, warm_start=True)
        return powers, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    hooks = {"f16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    return None, _renamed(hooks[job.bits]) if job.bits in hooks else None


def _renamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """DDP refuses PyTorch's bf16 hooks on the CPU by their names; without the names they work."""
    return lambda state, bucket: hook(state, bucket)


def train(job: Job, text: Tensor, held_out: Tensor) -> Log:
    """Trains in the present process group. Times are seconds of training, without validation and calibration."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(job.seed)
    gpt = Gpt(job.context, job.width, job.layers, job.heads)
    site = None if job.local is None else dist.new_group([rank], use_local_synchronization=True)
    model = DistributedDataParallel(
        gpt, process_group=site, bucket_cap_mb=job.bucket_mb, gradient_as_bucket_view=job.overlap
    )
    optimizer = optimizer_of(job, model)
    local = None if job.local is None else commlayer.LocalSteps(model, optimizer, group=dist.group.WORLD, **job.local)
    state, hook = (None, None) if local is not None else hook_of(job, model.module, optimizer)
    ours = state if isinstance(state, commlayer.HookState) else None
    if ours is not None:
        ours.group()  # makes it, or the first step would
    overlap = commlayer.overlap(model, optimizer, state=ours) if job.overlap else None
    if hook is not None and overlap is None:
        model.register_comm_hook(state, hook)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, job.steps))
    inputs, targets = draw_batch(held_out, job.context, job.validation_batch, 1_000_000 + rank)

    def loss_of(step: int) -> Tensor:
        draw = draw_batch(text, job.context, job.batch, (job.seed * 100_000 + step) * world + rank)
        return functional.cross_entropy(model(draw[0]).flatten(0, 1), draw[1].flatten())

    def validate(*, is_last: bool) -> float:
        with torch.no_grad(), contextlib.nullcontext() if local is None or is_last else local.averaged():
            loss = functional.cross_entropy(model.module(inputs).flatten(0, 1), targets.flatten())
        dist.all_reduce(loss)
        return loss.item() / world

    step_s: list[float] = []
    alone: list[tuple[float, float]] = []
    update_s: list[float] = []
    cpu_s: list[float] = []
    sent_bytes: list[int] = []
    validations: list[tuple[int, float, float]] = []
    sharing = contextlib.ExitStack()
    if local is not None:
        sharing.enter_context(local)
    dist.barrier()
    for step in range(job.steps):
        start, start_cpu, start_sent = time.perf_counter(), time.process_time(), interface_bytes()
        loss_of(step).backward()
        update_start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        is_last = step + 1 == job.steps
        if is_last:
            sharing.close()  # the last syncs are a part of the training
        end = time.perf_counter()
        step_s.append(end - start)
        cpu_s.append(time.process_time() - start_cpu)
        sent_bytes.append(interface_bytes() - start_sent)
        update_s.append(end - update_start)
        pause = False
        if (job.validate_every and (step + 1) % job.validate_every == 0) or is_last:
            validations.append((step + 1, sum(step_s), validate(is_last=is_last)))
            pause = True
        if step % CALIBRATE_EVERY == WARM_UP_STEPS:
            # the same work without communication; drop its gradients
            if overlap is not None:
                overlap.finish()
            dist.barrier()
            start = time.perf_counter()
            with model.no_sync():
                loss = loss_of(step)
                forward_end = time.perf_counter()
                loss.backward()
            alone.append((forward_end - start, time.perf_counter() - forward_end))
            optimizer.zero_grad()
            pause = True
        if pause:
            dist.barrier()  # all ranks start the next step together

    if overlap is not None:
        overlap.finish()
    digests: list[Any] = [None] * world
    dist.all_gather_object(digests, parameters_digest(model))
    lost = torch.tensor([ours.uncounted_bytes, ours.averaged_bytes] if ours else [0, 0])
    dist.all_reduce(lost)
    sent = lost[1].item() * (world - 1) / world  # a rank does not send its own shard
    return {
        "job": dataclasses.asdict(job),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "fine": sum(parameter.numel() for parameter in model.parameters() if parameter in commlayer.Fine(model.module)),
        "ranks": world,
        "step_s": [round(time_s, 5) for time_s in step_s],
        "forward_s": statistics.median(forward_s for forward_s, _ in alone) if alone else None,
        "backward_s": statistics.median(backward_s for _, backward_s in alone) if alone else None,
        "update_s": statistics.median(update_s),
        "cpu_s": [round(time_s, 5) for time_s in cpu_s],
        "sent_bytes": sent_bytes,
        "validations": validations,
        "replicas_identical": len(set(digests)) == 1,
        "uncounted_share": lost[0].item() / sent if sent else 0.0,
    }


def measure(scenario: Scenario, jobs: Sequence[Job], folder: Path, *, name: str) -> list[Log]:
    """Runs the jobs in the emulated network and returns their logs, fewer than jobs if one failed twice.

    Jobs and logs stay in `folder`. Raises EmulationError if the network cannot be made (it needs root).
    """
    folder.mkdir(parents=True, exist_ok=True)
    request, written = folder / f"{name}.jobs.json", folder / f"{name}.logs.jsonl"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)  # the ranks import from here
    logs: list[Log] = []
    failures = 0  # failures of the next job
    while len(logs) < len(jobs) and failures < 2:
        request.write_text(json.dumps([dataclasses.asdict(job) for job in jobs[len(logs) :]]))
        written.unlink(missing_ok=True)
        with terminable(), Network(scenario) as network, Stress(network) as stress:
            command = [sys.executable, "-m", "bench.jobs.training", str(request.resolve()), str(written.resolve())]
            run(network, command, trouble=functools.partial(getattr, stress, "error"))
        more = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
        logs += more
        failures = 1 if more else failures + 1
    return logs


def measure_all(scenario: Scenario, jobs: Sequence[Job], folder: Path, *, name: str) -> list[Log]:
    """The logs of all jobs. Raises BenchError if one failed twice."""
    logs = measure(scenario, jobs, folder, name=name)
    if len(logs) < len(jobs):
        raise BenchError(f"{name}: only {len(logs)} of {len(jobs)} runs ended")
    return logs


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("jobs", type=Path, help="a JSON list of jobs, see Job")
    parser.add_argument("logs", type=Path, help="file to which rank 0 adds a line of JSON per job")
    parser.add_argument("--limit", type=float, default=JOB_LIMIT_S, help="seconds per job (default: %(default)s)")
    arguments = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)  # ranks share the cores
    text, held_out = hold_out(standard_library_text())
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, world, rank == 0, STORE_TIMEOUT)
    default_tcp_cc = TCP_CC.read_text()
    for number, content in enumerate(json.loads(arguments.jobs.read_text())):
        job = Job(**content)
        faulthandler.dump_traceback_later(arguments.limit, exit=True)
        # a new socket takes its congestion control from its namespace, or from the listening socket
        TCP_CC.write_text(job.tcp_cc or default_tcp_cc)
        prefixed = dist.PrefixStore(f"job {number}", store)
        dist.init_process_group(job.backend, store=prefixed, rank=rank, world_size=world)
        log = train(job, text, held_out)
        if rank == 0:
            with arguments.logs.open("a") as out:
                out.write(json.dumps(log) + "\n")
            last = log["validations"][-1]
            print(f"{job.system}, seed {job.seed}: {last[1]:.1f} s, loss {last[2]:.4f}", flush=True)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
