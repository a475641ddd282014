"""Step time of tensor parallelism whose all-reduces travel while another part of the batch computes.

    python -m bench.overlap_tp                     everything (about 11 minutes; the links need root)
    python -m bench.overlap_tp --rounds 9          more rounds
    python -m bench.overlap_tp --slower 2          half the link rate, twice the times: half the CPU share
    python -m bench.overlap_tp --quick             one round of few steps; keeps nothing
    python -m bench.overlap_tp --trace out.json    a step of `tp.overlap`; keeps nothing
    python -m bench.overlap_tp --table             only the tables of the kept results

Three cases, measured like bench.overlap: the accelerator is a sleep, the all-reduces are real, between emulated hosts.

- Steps: two ranks, all-reduces as long as the computation. A layer has one all-reduce per direction. The codec int8
  shortens it; the values are random, so nothing is said here about a loss (bench.fidelity_tp).
- Latency: an all-reduce of 64 KB, as in tensor parallelism, while gradients travel over the same links.
- Mixed: tensor parallelism in pairs of ranks, whose gradients travel between the pairs until the next forward pass.
  Four ranks compute and communicate, so their links are slower and their layers take longer: else more than a quarter
  of the CPU would be busy, which makes a row void.

Writes bench/results/overlap_tp.json, tables of docs/overlap.md and docs/overlap_tp.png.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import commlayer
from bench.harness import turns
from bench.harness.bars import Bar, draw
from bench.harness.driver import Benchmark
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import PAGE, ROOT, Log, busy_cell, by_system, in_turns, slowed, spread, step_s, verdict
from bench.jobs.tensor_parallel import BATCH, INT8, LAYERS, OURS, SERIAL, WEIGHTS, Gradients, model
from commlayer.plans.codec import CODECS
from commlayer.scheduler.trace import write_trace
from commlayer.tools.bench import machine
from commlayer.tools.bench.cpu import CpuTime
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/overlap_tp.json"
PICTURE = ROOT / "docs/overlap_tp.png"
SCENARIO = "overlap"

FORWARD_S = 0.06
"""The forward pass of a layer, with the whole batch, on links at full speed; its backward pass takes twice as long."""
REDUCE = 1.5
"""An all-reduce of the whole batch, in forward times: then both take as long, as two follow a layer's three."""
GRADIENTS = 0.5
"""A layer's gradients between data-parallel ranks, in forward times."""
WARM_UP_STEPS, STEPS, ROUNDS = 1, 4, 6
SAMPLES, IN_FLIGHT = 150, 4
TENSOR_BYTES, BUCKET_BYTES = 64 << 10, 1 << 20

TARGETS = {SERIAL: (1.45, 1.57), WEIGHTS: (None, 1.31)}
"""The ratio of a system's step to ours: target, and the limit of an ideal network."""
INT8_TARGET = (1.75, 1.94)
"""The ratio of DTensor's step to ours with int8: target, and the limit of an ideal network that encodes in no time."""
INT8_BYTES = CODECS["int8"].encoded_bytes(1 << 20) / (1 << 20)
"""Bytes of an encoded message, per byte of float32."""
MODEL_TARGET = 0.9
"""The ratio of the model's step to ours."""
IDLE, PRIORITY, ONE_CLASS = "idle links", "gradients in flight", "gradients in flight, one class"
P50_TARGET, P99_TARGET = 1.5, 2.0
"""The ratio of `PRIORITY` to `IDLE`."""
ALONE, MIXED, MIXED_ONE_CLASS = "tensor parallelism alone", "with gradients", "with gradients, one class"
MIXED_SLOWER = 2.5
"""Factor of the times of the mixed case; at 2, 24 % of two cores were busy."""
MIXED_TARGET = 1.10
"""The ratio of `MIXED` to the longer of `ALONE` and all communication."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of one system."""

    system: str
    steps: int = STEPS
    samples: int = SAMPLES
    forward_s: float = FORWARD_S
    trace: bool = False


# ---- model ----------------------------------------------------------------------------------------------------------


def direction_s(compute_s: float, reduce_s: float, parts: int) -> float:
    """Seconds of a forward or backward pass on an ideal network, which carries one all-reduce after another."""
    processor = link = 0.0
    arrived = [0.0] * parts
    for _ in range(LAYERS):
        for part in range(parts):
            processor = max(processor, arrived[part]) + compute_s / parts
            link = max(link, processor) + reduce_s / parts
            arrived[part] = link
    return max(arrived)


def ideal_s(system: str, forward_s: float) -> float:
    """Seconds of a step on an ideal network.

    `WEIGHTS`: the all-reduce of a layer's input gradient travels beside its weight gradients, half of the backward
    pass.
    """
    reduce_s = REDUCE * forward_s * (INT8_BYTES if system == INT8 else 1)
    if system == WEIGHTS:
        return LAYERS * (forward_s + reduce_s + forward_s + max(forward_s, reduce_s))
    parts = 1 if system == SERIAL else 2
    return direction_s(forward_s, reduce_s, parts) + direction_s(2 * forward_s, reduce_s, parts)


def width_of(scenario: Scenario, forward_s: float) -> int:
    """The width of activations with which the all-reduce of a batch between two ranks takes REDUCE forward times."""
    assert scenario.payload_gb_s is not None
    return int(scenario.payload_gb_s * 1e9 * REDUCE * forward_s / (4 * BATCH))  # each sends all of it


# ---- on each rank ---------------------------------------------------------------------------------------------------


def train(job: Job, width: int) -> Log:
    """Seconds of each step, and the busy share of the machine's CPU."""
    size = dist.get_world_size()
    is_mixed = job.system in (ALONE, MIXED, MIXED_ONE_CLASS)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    layers = model(OURS if is_mixed else job.system, width, job.forward_s, mesh["tp"])
    gradients = None
    if job.system in (MIXED, MIXED_ONE_CLASS):
        values = int(width * BATCH * GRADIENTS / REDUCE)
        gradients = Gradients(layers, mesh.get_group("dp"), values, by_class=job.system == MIXED)
    inputs = torch.randn(BATCH, width)

    def step() -> None:
        layers.zero_grad()
        layers(inputs.clone().requires_grad_()).square().mean().backward()

    log = turns.timed(step, WARM_UP_STEPS, job.steps, trace=job.trace)
    if gradients is not None:
        gradients.finish()
    dist.barrier()
    return {**log, "spans": turns.spans_of_ranks()} if job.trace else log


def sample(job: Job) -> Log:
    """Seconds of each small all-reduce, while buckets are in flight in a group of their own."""
    group = dist.new_group()
    buckets = [torch.ones(BUCKET_BYTES // 4) for _ in range(IN_FLIGHT)]
    works: list[Any] = [None] * IN_FLIGHT
    started = 0

    def start() -> None:
        nonlocal started
        i = started % IN_FLIGHT
        if works[i] is not None:
            works[i].wait()
        works[i] = dist.all_reduce(buckets[i], group=group, async_op=True)
        started += 1

    tensor, seconds = torch.ones(TENSOR_BYTES // 4), []
    dist.barrier()
    start_cpu, start_s = CpuTime.now(), time.perf_counter()
    for _ in range(job.samples):
        while job.system != IDLE and (works[started % IN_FLIGHT] is None or works[started % IN_FLIGHT].is_completed()):
            start()
        time.sleep(job.forward_s / 12)
        begin = time.perf_counter()
        with commlayer.priority(0 if job.system == PRIORITY else 4):
            dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - begin)
    log = turns.busy(CpuTime.now() - start_cpu, time.perf_counter() - start_s)
    most = torch.tensor(started)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    while started < most:
        start()
    for work in works:
        if work is not None:
            work.wait()
    return {"step_s": seconds, **log}


def run_job(given: Log, request: Log) -> Log:
    """Runs one job of any case, for turns.serve."""
    job = Job(**given)
    return sample(job) if job.system in (IDLE, PRIORITY, ONE_CLASS) else train(job, request["width"])


# ---- measurement and tables -----------------------------------------------------------------------------------------


def run_jobs(scenario: Scenario, name: str, jobs: Sequence[Job], forward_s: float) -> list[Log]:
    """Runs the jobs. Raises BenchError if a rank failed."""
    two = dataclasses.replace(scenario, hosts=2)
    request = {"width": width_of(two, forward_s), "jobs": [dataclasses.asdict(job) for job in jobs]}
    return turns.measure(scenario, "bench.overlap_tp", request, f"tp-{name}")


def measure(rounds: int, slower: float, *, short: bool) -> dict[str, Any]:
    """All cases. Raises BenchError if a rank failed."""
    scenario, about = Scenario.read(SCENARIO), machine.facts()

    def runs(hosts: int, factor: float, name: str, systems: Sequence[str]) -> list[Log]:
        jobs = [
            Job(
                system,
                1 if short else STEPS,
                (SAMPLES // 10 if system == ONE_CLASS else SAMPLES) // (10 if short else 1),
                FORWARD_S * factor,
            )
            for system in systems
        ]
        links = dataclasses.replace(slowed(scenario, factor), hosts=hosts)
        return run_jobs(links, name, in_turns(jobs, rounds), FORWARD_S * factor)

    two = dataclasses.replace(slowed(scenario, slower), hosts=2)
    return {
        "schema": 1,
        "network": slowed(scenario, slower).table,
        "mixed_network": slowed(scenario, slower * MIXED_SLOWER).table,
        "width": width_of(two, FORWARD_S * slower),
        "steps": runs(2, slower, "steps", (SERIAL, WEIGHTS, OURS, INT8)),
        "latency": runs(2, slower, "latency", (IDLE, PRIORITY, ONE_CLASS)),
        "mixed": runs(4, slower * MIXED_SLOWER, "mixed", (ALONE, MIXED, MIXED_ONE_CLASS)),
        "machine": about,
        "measured": today(),
    }


def trace(slower: float, path: Path) -> None:
    """Writes the last measured step of `tp.overlap` on both ranks."""
    scenario = dataclasses.replace(slowed(Scenario.read(SCENARIO), slower), hosts=2)
    forward_s = FORWARD_S * slower
    (log,) = run_jobs(scenario, "trace", [Job(OURS, 1, forward_s=forward_s, trace=True)], forward_s)
    write_trace(path, {"measured": turns.last_step(log)})


def conditions(content: dict[str, Any], text: str, network_name: str = "network") -> str:
    network = Scenario.from_table(content.get(network_name, content["network"]))
    rounds = len(by_system(content["steps"])[OURS])
    return (
        f"\n\n{text} Links as in: {network}. {turns.about_rounds(rounds)} CPU: the largest share of any round. "
        f"{measured_on(content, 'overlap_tp')}"
    )


def steps_table(content: dict[str, Any]) -> str:
    found = by_system(content["steps"])
    forward_s = found[OURS][0]["job"]["forward_s"]
    ours = [step_s(log) for log in found[OURS]]
    rows = []
    for system in (SERIAL, WEIGHTS, OURS):
        steps = [step_s(log) for log in found[system]]
        ratios = [one / other for one, other in zip(steps, ours, strict=True)]
        target, limit = TARGETS.get(system, (None, None))
        reached = "" if target is None else verdict(statistics.median(ratios) >= target, found[system], found[OURS])
        wanted = f"≥ {target:.2f} (limit {limit:.2f})" if target else f"(limit {limit:.2f})" if limit else ""
        model_s, ratio = ideal_s(system, forward_s), spread(ratios, 1, ".3f")
        if system == OURS:
            ratios = [model_s / our_s for our_s in ours]
            wanted = f"model / step ≥ {MODEL_TARGET:.2f}"
            reached = verdict(statistics.median(ratios) >= MODEL_TARGET, found[OURS])
            ratio = f"model / step {spread(ratios, 1, '.3f')}"
        rows.append(
            [
                system,
                spread(steps, 1e3, ".0f"),
                f"{model_s * 1e3:.0f}",
                busy_cell(found[system]),
                ratio,
                wanted,
                reached,
            ]
        )
    if INT8 in found:  # not in results from before
        rows.append(int8_row(found, forward_s))
    columns = ["system", "step (ms)", "model (ms)", "CPU busy", "its step / ours", "target", "reached"]
    text = (
        f"{LAYERS} layers with one all-reduce of {BATCH}x{content['width']} values per direction between two ranks; "
        f"{forward_s * 1e3:g} ms forward and {2e3 * forward_s:g} ms backward each, by sleeping."
    )
    return markdown(columns, rows) + conditions(content, text)


def int8_row(found: dict[str, list[Log]], forward_s: float) -> list[str]:
    """The row of the codec, beside DTensor."""
    steps = [step_s(log) for log in found[INT8]]
    ratios = [step_s(other) / own for other, own in zip(found[SERIAL], steps, strict=True)]
    target, limit = INT8_TARGET
    return [
        INT8,
        spread(steps, 1e3, ".0f"),
        f"{ideal_s(INT8, forward_s) * 1e3:.0f}",
        busy_cell(found[INT8]),
        f"{SERIAL} / step {spread(ratios, 1, '.3f')}",
        f"≥ {target:.2f} (limit {limit:.2f})",
        verdict(statistics.median(ratios) >= target, found[SERIAL], found[INT8]),
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value with at least this share of the values up to it."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def latency_table(content: dict[str, Any]) -> str:
    found = by_system(content["latency"])
    idle = found[IDLE]
    rows = []
    for system in (IDLE, PRIORITY, ONE_CLASS):
        cells = [system]
        for share, target in ((0.5, P50_TARGET), (0.99, P99_TARGET)):
            values = [quantile(log["step_s"], share) for log in found[system]]
            ratios = [one / quantile(other["step_s"], share) for one, other in zip(values, idle, strict=True)]
            cells += [spread(values, 1e3, ".1f"), "" if system == IDLE else spread(ratios, 1, ".2f")]
            is_judged = system == PRIORITY
            reached = verdict(statistics.median(ratios) <= target, found[system], idle)
            cells.append(f"≤ {target:.1f}: {reached}" if is_judged else "")
        rows.append([*cells, busy_cell(found[system])])
    columns = ["while", "p50 (ms)", "/ idle", "target", "p99 (ms)", "/ idle", "target", "CPU busy"]
    text = (
        f"All-reduces of {TENSOR_BYTES >> 10} KB between two ranks, {idle[0]['job']['samples']} per round "
        f"({found[ONE_CLASS][0]['job']['samples']} in one class), while {IN_FLIGHT} all-reduces of "
        f"{BUCKET_BYTES >> 20} MB of gradients are always in flight."
    )
    return markdown(columns, rows) + conditions(content, text)


def communication_s(forward_s: float) -> float:
    """Seconds of all communication of a mixed step on an ideal network."""
    return LAYERS * (2 * REDUCE + GRADIENTS) * forward_s


def mixed_table(content: dict[str, Any]) -> str:
    found = by_system(content["mixed"])
    forward_s = found[ALONE][0]["job"]["forward_s"]
    bounds = [max(step_s(log), communication_s(forward_s)) for log in found[ALONE]]
    rows = []
    for system in (ALONE, MIXED, MIXED_ONE_CLASS):
        steps = [step_s(log) for log in found[system]]
        ratios = [one / other for one, other in zip(steps, bounds, strict=True)]
        reached = verdict(statistics.median(ratios) <= MIXED_TARGET, found[system], found[ALONE])
        rows.append(
            [
                system,
                spread(steps, 1e3, ".0f"),
                busy_cell(found[system]),
                "" if system == ALONE else spread(ratios, 1, ".3f"),
                f"≤ {MIXED_TARGET:.2f}: {reached}" if system == MIXED else "",
            ]
        )
    text = (
        f"Two pairs of tensor-parallel ranks, layers of {forward_s * 1e3:g} ms. All communication of a step takes "
        f"{communication_s(forward_s) * 1e3:.0f} ms on an ideal network, the gradients "
        f"{LAYERS * GRADIENTS * forward_s * 1e3:.0f} ms of it; the bound is that, or the step without gradients, "
        f"whichever is longer."
    )
    columns = ["system", "step (ms)", "CPU busy", "step / bound", "target"]
    return markdown(columns, rows) + conditions(content, text, "mixed_network")


def picture(content: dict[str, Any]) -> None:
    """Draws the steps, beside the model's and the bound."""
    steps, mixed = by_system(content["steps"]), by_system(content["mixed"])
    model = {name: ideal_s(name, logs[0]["job"]["forward_s"]) for name, logs in steps.items()}
    bound = max(statistics.median(map(step_s, mixed[ALONE])), communication_s(mixed[ALONE][0]["job"]["forward_s"]))
    cases = {
        "tensor parallelism, communication as long as computation": [
            Bar.of(name, [*map(step_s, logs)], limit_s=model[name], is_ours=name in (OURS, INT8))
            for name, logs in steps.items()
        ],
        "tensor and data parallelism in one step, beside the bound": [
            Bar.of(name, [*map(step_s, mixed[name])], limit_s=bound, is_ours=name == MIXED)
            for name in (ALONE, MIXED, MIXED_ONE_CLASS)
        ],
    }
    draw(cases, PICTURE, limit="ideal network, bound")


def main() -> int:
    """0; ends with 2 if a run failed."""
    parser = turns.parser(__doc__, ROUNDS)
    turns.add_trace(parser)
    parsed = parser.parse_args()
    return turns.main(parsed, Benchmark(RESULTS, PAGE, tables_of, picture=picture), measure, run_job, trace=trace)


def tables_of(content: Log) -> dict[str, str]:
    """By their places in the page."""
    return {"tp": steps_table(content), "tp_latency": latency_table(content), "tp_mixed": mixed_table(content)}


if __name__ == "__main__":
    sys.exit(main())
