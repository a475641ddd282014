"""Training with compressed gradients beside gloo at its best, on links of several rates.

    python -m bench.compression                     steps at all rates (about an hour; the links need root)
    python -m bench.compression --only 100          one rate in Mbit/s, merged into the kept results
    python -m bench.compression --train --only 100  time to a validation loss at this rate, with `auto`
    python -m bench.compression --quick             one round, 100 Mbit/s; keeps nothing
    python -m bench.compression --table             only the tables of the kept results

The job is that of docs/training.md: 4 hosts, 1.07 M parameters, AdamW. All systems take turns: a round runs each of
them once, and each round begins with another one. Bytes are those that the kernel counts on the interface of rank 0,
acknowledgements included. For the time to a loss, systems train 80 steps with each seed, in turns. Writes
bench/results/compression.json, the tables of docs/compression.md and docs/compression_RATE.png.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench.harness.curves import plot
from bench.harness.driver import Benchmark, Content
from bench.harness.options import options
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import by_system, in_turns
from bench.jobs.training import ROOT, Job, Log, measure_all
from bench.jobs.virtual_ranks import PACKET_BYTES
from bench.time_to_loss import MODEL, SEEDS, TARGET_LOSS, TRAINING, time_to_loss
from commlayer.compress.codec import ENCODED, FINE
from commlayer.plans.encoded import bytes_per_value
from commlayer.tools.bench import machine
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/compression.json"
PAGE = ROOT / "docs/compression.md"
LOGS = ROOT / "out/compression"

RATES_MBIT_S = (20, 100, 200, 1000)
LOSSES = (0.0, 0.01)
ROUNDS = 5
STEPS, WARM_UP = 13, 5
"""Steps of a run, and those left out: DDP regroups its buckets and torch's PowerSGD begins in them."""
HOSTS = 4
HEADER_BYTES = 82
"""Ethernet, IP, UDP and DLCP headers of a packet."""

CODECS_MEASURED = ("f16", "int8", "int4-int8", "int4")
SYSTEMS = (
    *(Job(f"gloo, {cc} {bits}", "gloo", cc, bits, None, 2.0) for cc in ("bbr", "cubic") for bits in ("f16", "bf16")),
    *(Job(f"gloo, bbr PowerSGD {rank}", "gloo", "bbr", f"powersgd:{rank}:3", None, 25.0) for rank in (1, 4)),
    *(Job(f"commlayer, {codec}", "commlayer", None, "f32", {"codec": codec}, 2.0) for codec in CODECS_MEASURED),
    Job("commlayer, sign", policy={"codec": "sign", "exact_steps": 3}, bucket_mb=2.0, optimizer="SGD"),
    *(
        Job(f"commlayer, PowerSGD {rank}", policy={"codec": f"powersgd:{rank}", "exact_steps": 3}, bucket_mb=25.0)
        for rank in (1, 4)
    ),
)

WITH_STATE = {"codec": "auto", "allow_state": True, "exact_steps": 8}
"""PowerSGD may begin where torch's does."""
TRAINED = (
    *(Job(f"gloo, bbr PowerSGD {rank}", "gloo", "bbr", f"powersgd:{rank}:8", None, 25.0) for rank in (1, 4)),
    Job("commlayer, auto", "commlayer", None, "f32", {"codec": "auto"}, 2.0),
    Job("commlayer, auto with state", "commlayer", None, "f32", WITH_STATE, 2.0),
)
PLAIN = {
    loss: Job(f"gloo, {cc} f16", "gloo", cc, "f16", None, 2.0)
    for loss, cc in zip(LOSSES, ("cubic", "bbr"), strict=True)
}
"""The best 16-bit gloo by the tables of steps, by the loss of the links."""
KINDS = ("", "Time to a loss, ")
"""Measurements: of steps, and of trainings."""

TARGETS_S: dict[tuple[str, int], float] = {
    ("int8", 20): 0.717,
    ("int8", 100): 0.170,
    ("int8", 200): 0.100,
    ("int8", 1000): 0.060,
    ("int4-int8", 100): 0.138,
    ("int4", 20): 0.388,
    ("int4", 100): 0.105,
    ("int4", 200): 0.070,
    ("sign", 100): 0.057,
}


def name_of(rate_mbit_s: int, loss: float) -> str:
    """The name of a network in the results."""
    return f"{rate_mbit_s} Mbit/s, {f'{loss:.0%} loss' if loss else 'no loss'}"


def names_at(rate_mbit_s: int) -> list[str]:
    """The names of the networks of this rate."""
    return [name_of(rate_mbit_s, loss) for loss in LOSSES]


def bytes_per_step(codec: str, parameters: int, fine: int) -> float:
    """Bytes that a rank must send in a step: values, scales and headers of full packets. `fine`: values in 16 bits."""
    pair, fine_pair = ENCODED[codec], ENCODED[FINE]
    assert pair is not None  # none is not measured
    assert fine_pair is not None
    value, fine_value = (bytes_per_value(each[:2], HOSTS) for each in (pair, fine_pair))
    payload = (HOSTS - 1) / HOSTS * (value * (parameters - fine) + fine_value * fine)
    return payload * (1 + HEADER_BYTES / PACKET_BYTES)


def per_step(logs: Sequence[Log], field: str) -> list[float]:
    """The median step of each run."""
    return [statistics.median(log[field][WARM_UP:]) for log in logs]


def tables(content: dict[str, Any]) -> str:
    """The page's tables, as Markdown."""
    return "\n\n".join(
        line
        for name, network in content.items()
        for line in (f"### {name}", *(_training(network) if name.startswith(KINDS[1]) else _network(name, network)))
    )


def _is_plain(system: str) -> bool:
    """Whether it is gloo in 16 bits."""
    return system.startswith("gloo") and "PowerSGD" not in system


def _ratio(theirs: Sequence[float | None], ours: Sequence[float | None]) -> str:
    """The median ratio of two systems' times, by seed."""
    pairs = zip(theirs, ours, strict=True)
    ratios = [a / b for a, b in pairs if a is not None and b is not None]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def _training(network: dict[str, Any]) -> list[str]:
    runs = by_system(network["runs"])
    times = {system: [time_to_loss(log, TARGET_LOSS) for log in logs] for system, logs in runs.items()}
    columns = ["system", "time to loss (s)", "range", "best 16-bit gloo / this", "best gloo / this", "final loss"]
    columns.append("MB sent")
    rows = []
    median_s = {system: statistics.median(time_s or math.inf for time_s in times[system]) for system in runs}
    gloo = [system for system in runs if system.startswith("gloo")]
    best = [min(systems, key=median_s.__getitem__) for systems in (list(filter(_is_plain, gloo)), gloo)]
    for system, logs in runs.items():
        reached = [time_s for time_s in times[system] if time_s is not None]
        whole = len(reached) == len(logs)
        cells = [
            system,
            f"{median_s[system]:.1f}" if whole else "not reached",
            f"{min(reached):.1f} to {max(reached):.1f}" if whole else "",
            *(_ratio(times[other], times[system]) if whole else "" for other in best),
            f"{statistics.fmean(log['validations'][-1][2] for log in logs):.4f}",
            f"{statistics.median(sum(log['sent_bytes']) for log in logs) / 1e6:.0f}",
        ]
        rows.append(cells)
    log = network["runs"][0]
    conditions = (
        f"Time to a validation loss of {TARGET_LOSS}, median of {len(next(iter(runs.values())))} seeds of "
        f"{log['job']['steps']} steps. {measured_on(network)}"
    )
    return [markdown(columns, rows), conditions]


def _network(name: str, network: dict[str, Any]) -> list[str]:
    runs = by_system(network["runs"])
    steps = {system: per_step(logs, "step_s") for system, logs in runs.items()}
    rate = int(name.split()[0])
    best = min(filter(_is_plain, steps), key=lambda system: statistics.median(steps[system]))
    columns = [
        "system",
        "step (ms)",
        "range",
        "best 16-bit gloo / this",
        "MB sent",
        "of the formula",
        "CPU (ms)",
        "target",
    ]
    rows = []
    for system, values in steps.items():
        median, codec = statistics.median(values), system.removeprefix("commlayer, ")
        ratios = [a / b for a, b in zip(steps[best], values, strict=True)]
        sent = statistics.median(per_step(runs[system], "sent_bytes"))
        log = runs[system][0]
        formula = f"{sent / bytes_per_step(codec, log['parameters'], log['fine']):.3f}" if codec in ENCODED else ""
        target = TARGETS_S.get((codec, rate))
        verdict = "" if target is None else f"{target * 1e3:.0f}: {'reached' if median <= target else '**missed**'}"
        cells = [
            system,
            f"{median * 1e3:.0f}",
            f"{min(values) * 1e3:.0f} to {max(values) * 1e3:.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{sent / 1e6:.2f}",
            formula,
            f"{statistics.median(per_step(runs[system], 'cpu_s')) * 1e3:.0f}",
            verdict,
        ]
        rows.append(cells)
    log = network["runs"][0]
    computing = statistics.median(
        run["forward_s"] + run["backward_s"] + run["update_s"] for run in network["runs"] if run["forward_s"]
    )
    conditions = (
        f"{log['parameters']:,} parameters, {log['ranks']} ranks, medians of {len(steps[best])} interleaved rounds of "
        f"{STEPS - WARM_UP} steps; {computing * 1e3:.0f} ms of a step are computation. {measured_on(network)}"
    )
    return [markdown(columns, rows), conditions]


def steps_of(rounds: int) -> list[Job]:
    """Every system in every round."""
    return in_turns([dataclasses.replace(job, steps=STEPS, validation_batch=1, **MODEL) for job in SYSTEMS], rounds)


def trainings(loss: float) -> list[Job]:
    """Every system with every seed; each seed begins with another system."""
    jobs = in_turns((PLAIN[loss], *TRAINED), len(SEEDS))
    seeds = [seed for seed in SEEDS for _ in range(1 + len(TRAINED))]
    return [dataclasses.replace(job, seed=seed, **TRAINING) for job, seed in zip(jobs, seeds, strict=True)]


def measure_network(name: str, rate_mbit_s: int, loss: float, jobs: list[Job]) -> dict[str, Any]:
    """Raises BenchError if a job did not run."""
    link = Link(rate_bps=rate_mbit_s * 1e6, loss=loss)
    scenario = Scenario(hosts=HOSTS, nics=(link,), tcp_congestion_control=("cubic", "bbr"))
    about = machine.facts()
    print(f"## {name}: {len(jobs)} runs", flush=True)
    runs = measure_all(scenario, jobs, LOGS, name=name.replace(" ", "_").replace("/", "_per_"))
    return {"network": scenario.table, "runs": runs, "machine": about, "measured": today()}


def in_order(content: Content) -> Content:
    """The networks that were measured, as the page has them."""
    names = [kind + name for kind in KINDS for rate in RATES_MBIT_S for name in names_at(rate)]
    return {name: content[name] for name in names if name in content}


def pictures(content: Content) -> None:
    """Draws the trainings of each rate."""
    for rate in RATES_MBIT_S:
        trained = {
            name: by_system(content[KINDS[1] + name]["runs"]) for name in names_at(rate) if KINDS[1] + name in content
        }
        if trained:
            plot(trained, TARGET_LOSS, PAGE.with_name(f"compression_{rate}.png"))


BENCHMARK = Benchmark(RESULTS, PAGE, lambda content: {"results": tables(in_order(content))}, picture=pictures)


def main() -> int:
    """0; 2 if a run failed."""
    parser = options(__doc__, only=RATES_MBIT_S, rounds=ROUNDS, quick="one round at 100 Mbit/s", table=True)
    parser.add_argument("--link-loss", type=float, choices=LOSSES, help="share of packets that links lose")
    parser.add_argument("--train", action="store_true", help="time to a loss instead of steps")
    asked = parser.parse_args()
    losses = LOSSES if asked.link_loss is None else (asked.link_loss,)
    cases = [(100, 0.0)] if asked.quick else list(itertools.product(asked.only or RATES_MBIT_S, losses))

    def measure(content: Content, case: tuple[int, float]) -> None:
        rate, loss = case
        name = KINDS[asked.train] + name_of(rate, loss)
        jobs = trainings(loss) if asked.train else steps_of(1 if asked.quick else asked.rounds)
        content[name] = measure_network(name, rate, loss, jobs)

    return BENCHMARK.main(asked, cases, measure)


if __name__ == "__main__":
    sys.exit(main())
