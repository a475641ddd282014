"""Systems that run in turns on emulated hosts, with a sleep as accelerator: what the overlap benchmarks share.

A benchmark names its jobs, runs them with `measure`, and calls `serve` on each rank. Each job has its own process
group. A sleep keeps no core busy, so the results show order, moments of launch and waits, and nothing about how
computation and communication share a processor.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness.driver import WHOLE, BenchError, Benchmark
from bench.harness.options import options
from commlayer.scheduler.simulate import Simulation
from commlayer.scheduler.trace import Span
from commlayer.tools.bench.cpu import CpuTime
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.ranks import run, terminable
from commlayer.tools.emulate.scenario import Scenario

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/overlap.md"
LOGS = ROOT / "out/overlap"
TCP_CC = Path("/proc/sys/net/ipv4/tcp_congestion_control")

BUSY_MAX = 0.25
"""The most of the machine's CPU in a valid row."""
REPEATS = 2
"""The most repeats of a job that ran beside another load."""
LIMIT_S = 120.0
"""A rank whose job takes longer prints its stack and ends, which ends the others."""

Log = dict[str, Any]
T = TypeVar("T")


class Accelerator(torch.autograd.Function):
    """A layer's computation: time passes, and no core is busy. Its backward pass takes twice as long."""

    spans: ClassVar[list[tuple[str, float, float]] | None] = None
    """What ran from when to when; None: nobody asks."""

    @classmethod
    def record(cls, on: bool) -> None:
        """Begins a new list of computations, or ends the list."""
        cls.spans = [] if on else None

    @classmethod
    def compute(cls, name: str, seconds: float) -> None:
        """Takes this long."""
        start_s = time.monotonic()
        time.sleep(seconds)
        if cls.spans is not None:
            cls.spans.append((name, start_s, time.monotonic()))

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        Accelerator.compute("forward", seconds)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Accelerator.compute("backward", 2 * ctx.seconds)
        return gradient.view_as(gradient), None


def spans_of_ranks() -> list[Span]:
    """The recorded computations of all ranks, from the first one on."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, Accelerator.spans or [])
    zero_s = min(start_s for own in everyones for _, start_s, _ in own)
    return [
        Span(rank, "compute", name, start_s - zero_s, end_s - zero_s)
        for rank, own in enumerate(everyones)
        for name, start_s, end_s in own
    ]


def last_step(log: Log) -> list[Span]:
    """The computations of the last step, of a job with `spans`."""
    spans = [Span(*span) for span in log["spans"]]
    start_s = max(span.end_s for span in spans) - log["step_s"][-1]
    kept = [span for span in spans if span.start_s >= start_s]
    return [turn._replace(start_s=turn.start_s - start_s, end_s=turn.end_s - start_s) for turn in kept]


def steady_step(model: Simulation) -> list[Span]:
    """A step of the model's steady state."""
    start_s = 6 * model.step_s
    return [
        span._replace(start_s=span.start_s - start_s, end_s=span.end_s - start_s)
        for span in model.spans
        if start_s <= span.start_s < start_s + model.step_s
    ]


def slowed(scenario: Scenario, slower: float) -> Scenario:
    """The scenario with links of a lower rate."""
    nics = (dataclasses.replace(nic, rate_bps=(nic.rate_bps or 0) / slower) for nic in scenario.nics)
    return dataclasses.replace(scenario, nics=tuple(nics))


def measure(scenario: Scenario, module: str, request: Mapping[str, Any], name: str) -> list[Log]:
    """Runs request["jobs"] in the emulated network: `python -m module --rank` on every rank.

    Raises BenchError if a rank failed.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    path, written = LOGS / f"{name}.jobs.json", LOGS / f"{name}.logs.jsonl"
    path.write_text(json.dumps(request))
    written.unlink(missing_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)  # the ranks import from here
    with terminable(), Network(scenario) as network:
        status = run(network, [sys.executable, "-m", module, "--rank", str(path), str(written)])
    logs = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    if status or len(logs) < len(request["jobs"]):
        raise BenchError(f"{name}: only {len(logs)} of {len(request['jobs'])} jobs ended")
    return logs


def serve(
    files: Sequence[Path],
    backend: Callable[[Log], str],
    train: Callable[[Log, Log], Log],
    limit_s: float = LIMIT_S,
    repeats: int = REPEATS,
) -> None:
    """Runs the jobs on each rank, each in a process group of its `backend`; rank 0 writes their logs. `files`: of the
    jobs and of the logs, from the option `--rank`.

    A job is a table with `system` and perhaps `tcp_cc`. `train` gets the job and the whole request, and returns its
    log: `step_s`, and the fields of `busy`. A job that ran beside another load is repeated, whatever its steps took, up
    to `repeats` times.
    """
    request, written = files
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world, rank == 0, timedelta(seconds=120))
    default_tcp_cc = TCP_CC.read_text()
    content = json.loads(request.read_text())
    for number, job in enumerate(content["jobs"]):
        TCP_CC.write_text(job.get("tcp_cc") or default_tcp_cc)
        for attempt in range(1 + repeats):
            faulthandler.dump_traceback_later(limit_s, exit=True)
            prefixed = dist.PrefixStore(f"job {number}.{attempt}", store)
            dist.init_process_group(backend(job), store=prefixed, rank=rank, world_size=world)
            log = {"job": job, "repeats": attempt, **train(job, content)}
            if rank == 0:
                prefixed.set("is disturbed", str(int(is_disturbed(log))))
                used = f"{log['busy']:.0%} busy, {log['of_ranks']:.0%} by ranks"
                print(f"{job['system']}: {step_s(log) * 1e3:.0f} ms, {used}", flush=True)
            again = prefixed.get("is disturbed") == b"1"
            dist.barrier()
            dist.destroy_process_group()
            gc.collect()  # groups in reference cycles, whose threads would charge the next jobs
            if not again:
                break
        if rank == 0:
            with written.open("a") as out:
                out.write(json.dumps(log) + "\n")


def is_disturbed(log: Log) -> bool:
    """Whether the row would be void, and not by the load of the ranks themselves."""
    return bool(log["of_ranks"] <= BUSY_MAX < log["busy"])


def timed(step: Callable[[], None], warm_up: int, count: int, *, trace: bool) -> Log:
    """The seconds of `count` steps after a warm-up, and `busy`, for a job's log. `trace`: records what computes in
    them."""
    seconds, start_cpu = [], CpuTime.now()
    dist.barrier()
    for number in range(warm_up + count):
        if number == warm_up:
            start_cpu = CpuTime.now()
            Accelerator.record(trace)
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    cpu = CpuTime.now() - start_cpu
    kept = seconds[warm_up:]
    return {"step_s": kept, **busy(cpu, sum(kept))}


def busy(cpu: CpuTime, seconds: float) -> dict[str, float]:
    """The busy share of the machine's CPU in these seconds, and the part that such ranks charge, for a job's log."""
    available_s = seconds * (os.cpu_count() or 1)
    return {"busy": cpu.machine_s / available_s, "of_ranks": cpu.process_s * dist.get_world_size() / available_s}


def step_s(log: Log) -> float:
    """Median step."""
    return float(statistics.median(log["step_s"]))


def in_turns(jobs: Sequence[T], rounds: int) -> list[T]:
    """Every system in every round; each round begins with another one."""
    return [job for number in range(rounds) for job in rotated(jobs, number)]


def rotated(jobs: Sequence[T], number: int) -> list[T]:
    """The jobs of a round, which begins with another one than the round before: the order favours none."""
    first = number % len(jobs)
    return [*jobs[first:], *jobs[:first]]


def by_system(runs: Sequence[Log]) -> dict[str, list[Log]]:
    """The logs of each system, by round."""
    found: dict[str, list[Log]] = {}
    for log in runs:
        found.setdefault(log["job"]["system"], []).append(log)
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics that has the median with at least 95 %; of less than 6 values, all."""
    ordered, n = sorted(values), len(values)
    outside, drop = 0.0, 0
    term = 0.5**n
    for k in range(n // 2):
        outside += 2 * term
        if outside > 0.05:
            break
        drop, term = k, term * (n - k) / (k + 1)
    return ordered[drop], ordered[n - 1 - drop]


def spread(values: Sequence[float], factor: float, form: str) -> str:
    """Median and interval, as a cell of a table."""
    low, high = interval(values)
    return f"{statistics.median(values) * factor:{form}} ({low * factor:{form}} to {high * factor:{form}})"


def is_void(*systems: Sequence[Log]) -> bool:
    """Whether the machine was too busy in a run of one of these systems."""
    return any(log["busy"] > BUSY_MAX for logs in systems for log in logs)


def busy_cell(logs: Sequence[Log]) -> str:
    """The largest busy share of the machine's CPU in any run, as a cell of a table."""
    return f"{max(log['busy'] for log in logs):.0%}" + " (**void**)" * is_void(logs)


def verdict(is_reached: bool, *systems: Sequence[Log]) -> str:
    """Whether a target is reached, as a cell of a table. A run of these systems on a busy machine makes it void."""
    return "void" if is_void(*systems) else "yes" if is_reached else "**no**"


def about_rounds(rounds: int) -> str:
    """What the figures of `spread` are."""
    words = "95 % interval, by order statistics" if rounds >= 6 else "range"
    return f"Median of {rounds} rounds ({words}); ratios are of the same round."


def parser(about: str | None, rounds: int, only: Collection[str] = ()) -> argparse.ArgumentParser:
    """The options that all of these benchmarks have."""
    made = options(about, only=only, rounds=rounds, quick="one quick round", table=True, ranks=True)
    made.add_argument("--slower", type=float, default=1.0, help="factor of all times (default: %(default)s)")
    return made


def add_trace(parser: argparse.ArgumentParser) -> None:
    """The argument of the benchmarks that write a trace."""
    text = "trace of one measured step, and of the model's, for ui.perfetto.dev; keeps nothing"
    parser.add_argument("--trace", type=Path, metavar="JSON", help=text)


def main(
    asked: argparse.Namespace,
    benchmark: Benchmark,
    measure: Callable[..., Log],
    train: Callable[[Log, Log], Log],
    *,
    backend: Callable[[Log], str] = lambda _: "commlayer",
    trace: Callable[[float, Path], None] | None = None,
) -> int:
    """The main function of a benchmark, after its options were parsed: a rank serves jobs; the parent process measures
    everything at once, or writes a trace, which keeps nothing. Returns the exit status."""
    if asked.rank:
        serve(asked.rank, backend, train)
        return 0

    def whole(content: Log, _: None) -> None:
        content.update(measure(1 if asked.quick else asked.rounds, asked.slower, short=asked.quick))

    if trace is None or not asked.trace:
        return benchmark.main(asked, WHOLE, whole)
    try:
        trace(asked.slower, asked.trace)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
