"""Step time of DDP when gradients travel during the next forward pass.

    python -m bench.overlap --ddp                     everything (about 8 minutes; the links need root)
    python -m bench.overlap --ddp --rounds 9          more rounds
    python -m bench.overlap --ddp --slower 2          half the link rate, twice the time per layer: half the CPU share
    python -m bench.overlap --ddp --short             one round of few steps; keeps nothing
    python -m bench.overlap --table                   only the table of the kept results

The accelerator is a sleep: every layer sleeps in its forward pass and twice as long in its backward pass. Collectives
are real, between emulated hosts. The layers are as large as makes an ideal transport's communication as long as
forward and backward. The systems run in turns; each round begins with another one. First, each stock DDP is tuned by
its bucket size, and gloo by TCP's congestion control.

Two systems have the hooks of `overlap` on a network that sends in order: on commlayer with one class, and on gloo.

Two cores run four hosts, so what this measures is order, moments of launch and waits. It prints the busy share of the
machine's CPU beside each row, and a row above 25 % is void. Writes bench/results/overlap.json and the table of
docs/overlap.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench import turns
from bench.page import write_between
from bench.turns import PAGE, ROOT, Accelerator, Log, by_system, in_turns, slowed, spread, step_s
from commlayer.frontend import overlap_ddp
from commlayer.frontend.overlap_ddp import DdpOverlap
from commlayer.tools.bench import machine
from commlayer.tools.bench.cpu import CpuTime
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/overlap.json"
SCENARIO = "overlap"

LAYERS = 8
FORWARD_S = 0.025
"""Of a layer, on links that are not slowed down; its backward pass takes twice as long."""
WARM_UP_STEPS, STEPS, ROUNDS = 3, 8, 6

GLOO, STOCK, OURS = "DDP, gloo", "DDP, commlayer", "overlap"
HOOKS, FIFO = "overlap's hooks, gloo", "overlap, one class"
SYSTEMS = (GLOO, STOCK, HOOKS, FIFO, OURS)
TARGETS = {GLOO: (1.20, 1.25), STOCK: (1.20, 1.25), HOOKS: (1.10, None), FIFO: (1.10, None)}
"""Of a system's step over ours: target, and the limit of an ideal network."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of one system."""

    system: str
    layers_per_bucket: int = 1
    tcp_cc: str | None = None
    steps: int = STEPS
    forward_s: float = FORWARD_S

    @property
    def backend(self) -> str:
        return "gloo" if self.system in (GLOO, HOOKS) else "commlayer"


class Layer(nn.Module):
    def __init__(self, width: int, forward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.forward_s = forward_s

    def forward(self, values: Tensor) -> Tensor:
        computed: Tensor = Accelerator.apply(torch.tanh(self.linear(values)), self.forward_s)  # type: ignore[no-untyped-call]
        return computed


def width_of(scenario: Scenario, forward_s: float = FORWARD_S) -> int:
    """Width of the layers, with which communication at the link's rate is as long as forward and backward."""
    rate, hosts = scenario.payload_gb_s, scenario.hosts
    assert rate is not None
    sent = rate * 1e9 * 3 * forward_s  # during one layer's forward and backward
    return int((sent * hosts / (2 * (hosts - 1)) / 4) ** 0.5)


def ideal_s(job: Job) -> float:
    """Seconds of a step on an ideal network, whose communication takes as long as forward and backward.

    In order, the front layers' bucket comes last, so the next forward pass begins when all communication is over. That
    begins when the backward pass has filled the first bucket. By next use, the front layers' bucket overtakes, and only
    its own time is added to forward and backward.
    """
    communication = 3 * job.forward_s * LAYERS
    if job.system == OURS:
        return communication + 3 * job.forward_s
    return job.forward_s * LAYERS + 2 * job.forward_s * job.layers_per_bucket + communication


def serve(request: Path, written: Path) -> None:
    """On each rank: runs the jobs."""
    turns.serve(
        request, written, lambda job: Job(**job).backend, lambda job, content: train(Job(**job), content["width"])
    )


def reduce_on_gloo(buffer: Tensor, *_: Any, **__: Any) -> Future[Tensor]:
    """Averages a bucket as `overlap` does it, in an all-reduce of gloo. In the place of `reduce_bucket`."""
    work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
    assert work is not None
    future: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


@contextlib.contextmanager
def hooks_of(
    system: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> Iterator[DdpOverlap | None]:
    """Within it, gradients travel as the system has it."""
    if system not in (OURS, FIFO, HOOKS):
        yield None
        return
    on_gloo = mock.patch.object(overlap_ddp, "reduce_bucket", reduce_on_gloo)
    with on_gloo if system == HOOKS else contextlib.nullcontext():
        handle = commlayer.overlap(model, optimizer)
        handle.by_next_use = system == OURS
        yield handle
        handle.remove()


def train(job: Job, width: int) -> Log:
    """Seconds of each step, the busy share of the machine's CPU, and the part of it that such ranks charge."""
    torch.manual_seed(1)
    layer_mb = 4 * width * width / (1 << 20)
    model = DistributedDataParallel(
        nn.Sequential(*(Layer(width, job.forward_s) for _ in range(LAYERS))),
        gradient_as_bucket_view=True,
        bucket_cap_mb=layer_mb * (job.layers_per_bucket - 0.1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.randn(2, width)
    step_s, start_cpu = [], CpuTime.now()
    with hooks_of(job.system, model, optimizer):
        dist.barrier()
        for step in range(WARM_UP_STEPS + job.steps):
            if step == WARM_UP_STEPS:
                start_cpu = CpuTime.now()
            start = time.perf_counter()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            step_s.append(time.perf_counter() - start)
        cpu = CpuTime.now() - start_cpu
    timed = step_s[WARM_UP_STEPS:]
    dist.barrier()
    return {"step_s": timed, **turns.busy(cpu, sum(timed))}


def measure(scenario: Scenario, jobs: Sequence[Job], name: str) -> list[Log]:
    """Runs the jobs in the emulated network. Raises RuntimeError if a rank failed."""
    request = {"width": width_of(scenario, jobs[0].forward_s), "jobs": [dataclasses.asdict(job) for job in jobs]}
    return turns.measure(scenario, "bench.overlap", request, name)


def tuned(scenario: Scenario, forward_s: float, *, short: bool) -> tuple[list[Job], list[Log]]:
    """The systems, each stock DDP with its best bucket size, gloo with its best TCP; and the logs of the tuning."""
    sizes = (1,) if short else (1, 2, 4)
    ccs = (None,) if short else scenario.tcp_congestion_control
    steps = 2 if short else 5
    jobs = [Job(GLOO, size, cc, steps, forward_s) for size in sizes for cc in ccs]
    jobs += [Job(STOCK, size, None, steps, forward_s) for size in sizes]
    jobs += [Job(HOOKS, 1, cc, steps, forward_s) for cc in ccs]
    logs = measure(scenario, jobs, "tuning")
    chosen = []
    for system in (GLOO, STOCK, HOOKS):
        best = min((log for log in logs if log["job"]["system"] == system), key=step_s)
        chosen.append(dataclasses.replace(Job(**best["job"]), steps=steps if short else STEPS))
    others = (Job(system, steps=steps if short else STEPS, forward_s=forward_s) for system in (FIFO, OURS))
    return [*chosen, *others], logs


def table(content: dict[str, Any]) -> str:
    """The page's table, as Markdown: only from the results and the targets."""
    found = by_system(content["runs"])
    ours = [step_s(log) for log in found[OURS]]
    columns = ["system", "configuration", "step (ms)", "model (ms)", "CPU busy", "its step / ours", "target", "reached"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for system in SYSTEMS:
        logs = found[system]
        job, steps = Job(**logs[0]["job"]), [step_s(log) for log in logs]
        ratios = [one / other for one, other in zip(steps, ours, strict=True)]
        target, limit = TARGETS.get(system, (None, None))
        cells = [
            system,
            ", ".join(filter(None, [f"{job.layers_per_bucket} layers per bucket", job.tcp_cc])),
            spread(steps, 1e3, ".0f"),
            f"{ideal_s(job) * 1e3:.0f}",
            turns.busy_cell(logs),
            "" if system == OURS else spread(ratios, 1, ".3f"),
            "" if target is None else f"≥ {target:.2f}" + (f" (limit {limit:.2f})" if limit else ""),
            "" if target is None else turns.verdict(statistics.median(ratios) >= target, logs, found[OURS]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    network, forward_ms = Scenario.from_table(content["network"]), job.forward_s * 1e3
    conditions = (
        f"{LAYERS} equal layers of {content['width']}x{content['width']} values, {forward_ms:g} ms forward and "
        f"{2 * forward_ms:g} ms backward each, by sleeping. Network: {network}. "
        f"{turns.about_rounds(len(ours))} CPU: the largest share of any round. "
        f"{turns.measured_on(content, 'overlap')}"
    )
    return "\n".join(lines) + "\n\n" + conditions


def measure_ddp(count: int, slower: float, *, short: bool) -> dict[str, Any]:
    """Tunes and measures, in `count` rounds. Raises RuntimeError if a rank failed."""
    scenario, about = slowed(Scenario.read(SCENARIO), slower), machine.facts()
    jobs, tuning = tuned(scenario, FORWARD_S * slower, short=short)
    return {
        "schema": 1,
        "network": scenario.table,
        "width": width_of(scenario, FORWARD_S * slower),
        "tuning": tuning,
        "runs": measure(scenario, in_turns(jobs, count), "runs"),
        "machine": about,
        "measured": turns.today(),
    }


def main() -> int:
    """0, or 2 if a run failed."""
    parser = turns.parser(__doc__, ROUNDS)
    parser.add_argument("--ddp", action="store_true", help="measure DDP")
    arguments = parser.parse_args()
    if arguments.rank:
        serve(*arguments.rank)
        return 0
    if not (arguments.ddp or arguments.table):
        parser.error("name a case: --ddp")
    if arguments.table:
        content = json.loads(RESULTS.read_text())
    else:
        try:
            content = measure_ddp(1 if arguments.short else arguments.rounds, arguments.slower, short=arguments.short)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2
    if not arguments.short:
        turns.write_results(RESULTS, content)
        write_between(PAGE, ddp=table(content))
    print(table(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
