"""Seconds per step with local steps on slow links, beside DDP on gloo at its best and on commlayer's hook.

    python -m bench.local_steps                 all links (about 20 minutes; the links need root)
    python -m bench.local_steps --only 20       one rate in Mbit/s, merged into the kept results
    python -m bench.local_steps --only 8x2      8 sites of 2 ranks, 20 and 1,000 Mbit/s, 100 ms there and back, 1 % loss
    python -m bench.local_steps --only 2x1      2 sites at 20 Mbit/s, 20 ms there and back
    python -m bench.local_steps --only speeds   4 sites of speeds 1, 1, 1 and 1/2 at 20 Mbit/s
    python -m bench.local_steps --only stalls   4 sites at 20 Mbit/s, of which one stalls now and then, for 2 s
    python -m bench.local_steps --only exact    where `auto` stays exact: 4 sites at 200 Mbit/s, beside DDP's hook
    python -m bench.local_steps --only torchft  beside torchft's DiLoCo and LocalSGD on gloo, 20 Mbit/s, in the
                                                environment .venv-hosts/torchft of the Makefile
    python -m bench.local_steps --train         trainings end to end at 20 and 100 Mbit/s (15 minutes)
    python -m bench.local_steps --quick         one round at 100 Mbit/s; keeps nothing
    python -m bench.local_steps --table         only the tables of the kept results

The accelerator is a sleep of 56 ms per step, as long as the GPT of docs/training.md computes, so that the cores do not
decide; the model has as many values, 1.07 million. (8x2: 280 ms, because two cores run 16 ranks.) Collectives are real,
between emulated hosts, each of which is a site. The systems run in turns; each round begins with another one. gloo has
float32 and torch's bf16 hook, with TCP cubic and bbr, and the best of them counts; the hook of commlayer has
`codec="auto"`, without and with state. LocalSGD is torch's `PeriodicModelAverager` on gloo, in float32.

A step's mean is over whole rounds of H. Bytes are those that the kernel counts on the interfaces of rank 0's host. The
busy share of the machine's CPU stands beside each row. The *time to a loss* is the mean step times the factor of
steps of bench/local_loss.py, for the same H, fragments, delay and codec: a product of two measurements.

With `--train` the byte GPT of bench/fidelity.py, 83,008 values, trains end to end, and computes on the cores. Exact
trainings make 1,500 steps, local ones 2,000, each with a whole cosine: time and loss at the end count. Writes
bench/results/local_steps.json and tables of docs/local_bench.md.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

from bench import local_loss
from bench.harness import turns
from bench.harness.driver import Benchmark, Content
from bench.harness.options import options
from bench.harness.results import read_results, today
from bench.harness.turns import ROOT, in_turns
from bench.jobs import training
from bench.jobs.local_steps import Job, train
from bench.local_steps_page import tables
from bench.local_systems import (
    EXACT,
    SPECIAL,
    SPEEDS,
    STALLS,
    TORCHFT,
    TRAINING,
    jobs_of,
    jobs_of_exact,
    jobs_of_pair,
    jobs_of_speeds,
    jobs_of_stalls,
    jobs_of_torchft,
    jobs_of_two,
    trainings,
)
from commlayer.tools.bench import machine
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/local_steps.json"
PAGE = ROOT / "docs/local_bench.md"
MODULE = "bench.local_steps"


class Network(NamedTuple):
    """The networks of a case, one per rate."""

    rates_mbit_s: tuple[int, ...]
    hosts: int = 4
    ranks_per_host: int = 1
    delay_ms: float = 0.0
    """One way."""
    loss: float = 0.0


RATES_MBIT_S = (20, 100, 200, 1000)
SITES_OF_TWO, PAIR = "8x2", "2x1"
NETWORKS = {
    **{str(rate): Network((rate,)) for rate in RATES_MBIT_S},
    SITES_OF_TWO: Network((20, 1000), hosts=8, ranks_per_host=2, delay_ms=50.0, loss=0.01),
    PAIR: Network((20,), hosts=2, delay_ms=10.0),
    SPEEDS: Network((20,)),
    STALLS: Network((20,)),
    EXACT: Network((200,)),
    TORCHFT: Network((20,)),
}
CASES = tuple(case for case in NETWORKS if case != TORCHFT)
ROUNDS = 3
TRAINED_AT = ("20", "100")
JOBS = {SPEEDS: jobs_of_speeds, STALLS: jobs_of_stalls, EXACT: jobs_of_exact, TORCHFT: jobs_of_torchft}
JOBS |= {SITES_OF_TWO: jobs_of_two, PAIR: jobs_of_pair}
"""Those of the other cases are `jobs_of`."""


def measure_training(rate: str) -> dict[str, Any]:
    """The trainings at a rate. Raises BenchError if one failed."""
    link = Link(rate_bps=int(rate) * 1e6)
    scenario = Scenario(NETWORKS[rate].hosts, (link,), tcp_congestion_control=("cubic", "bbr"))
    about = machine.facts()
    runs = training.measure_all(scenario, trainings(), turns.LOGS, name=f"local_training.{rate}")
    kept = [{**log, "step_s": [], "cpu_s": [], "sent_bytes": sum(log["sent_bytes"])} for log in runs]
    return {"network": scenario.table, "runs": kept, "machine": about, "measured": today()}


def measure_case(case: str, rounds: int, *, short: bool = False) -> dict[str, Any]:
    """The results of a case by the name of its network. Raises BenchError if a rank failed."""
    found = {}
    rates_mbit_s, hosts, per_host, delay_ms, loss = NETWORKS[case]
    for rate in rates_mbit_s:
        link = Link(rate_bps=rate * 1e6, loss=loss, delay_ms=delay_ms)
        algorithms = ("cubic", "bbr")
        scenario = Scenario(hosts, (link,), ranks_per_host=per_host, tcp_congestion_control=algorithms)
        jobs = JOBS.get(case, jobs_of)()
        if short:
            jobs = [dataclasses.replace(job, steps=2) for job in jobs]
        about = machine.facts()
        request = {"jobs": [dataclasses.asdict(job) for job in in_turns(jobs, rounds)]}
        name = f"{hosts} x {per_host}, {rate} Mbit/s{SPECIAL.get(case, '')}"
        runs = turns.measure(scenario, MODULE, request, f"local_steps.{case}.{rate}")
        order = {job.system: i for i, job in enumerate(jobs)}
        runs.sort(key=lambda log: order[log["job"]["system"]])
        found[name] = {"network": scenario.table, "runs": runs, "machine": about, "measured": today()}
    return found


def tables_of(content: Content) -> dict[str, str]:
    """The part of the page, with the factors of steps that another benchmark measured."""
    return {"steps": tables(content, read_results(local_loss.RESULTS, {}))}


BENCHMARK = Benchmark(RESULTS, PAGE, tables_of)


def main() -> int:
    """0; 2 if a run failed."""
    parser = options(
        __doc__, only=(*CASES, TORCHFT), rounds=ROUNDS, quick="one round at 100 Mbit/s", table=True, ranks=True
    )
    parser.add_argument("--train", action="store_true", help="trainings end to end, instead of steps")
    asked = parser.parse_args()
    if asked.rank:  # once: mostly jobs sleep and wait, so that a load beside them changes little
        turns.serve(asked.rank, lambda job: str(job["backend"]), lambda job, _: train(Job(**job)), repeats=0)
        return 0

    if asked.train and set(asked.only or ()) - set(TRAINED_AT):
        parser.error(f"--train: trainings run with --only {' and --only '.join(TRAINED_AT)}")

    def measure(content: Content, case: str) -> None:
        if asked.train:
            content[f"{TRAINING}{case} Mbit/s"] = measure_training(case)
        else:
            content |= measure_case(case, 1 if asked.quick else asked.rounds, short=asked.quick)

    return BENCHMARK.main(
        asked, ["100"] if asked.quick else asked.only or (TRAINED_AT if asked.train else CASES), measure
    )


if __name__ == "__main__":
    sys.exit(main())
