"""Time to a fixed validation loss on slow links that lose packets, against gloo at its best.

    python -m bench.time_to_loss                      everything (about 20 minutes; the links need root)
    python -m bench.time_to_loss --only loss1_100     one scenario, merged into the kept results
    python -m bench.time_to_loss --quick              one seed, few steps and one bucket size; keeps nothing
    python -m bench.time_to_loss --table              only the table of the kept results

First gloo is tuned in the same network by the median step time: TCP cubic and bbr, no hook and the fp16 and bf16
hooks, several bucket sizes; the better variants run again with more steps. commlayer sends gradients in as many bits as
the best gloo, and is tuned over the same bucket sizes. Then all systems train with every seed, in turns: same
initialisation, same data in the same order, same number of steps. Times are those of training, without validation.
Writes bench/results/time_to_loss.json and the table of docs/training.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.driver import BenchError, Benchmark, Content
from bench.harness.options import options
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import rotated
from bench.jobs.training import ROOT, WARM_UP_STEPS, Job, Log, measure
from commlayer.tools.bench import machine
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/time_to_loss.json"
PAGE = ROOT / "docs/training.md"
LOGS = ROOT / "out/time_to_loss"

TARGETS = {"loss1_100": 1.5, "burst1_incast100": 1.84}
"""Target of each scenario: gloo's time to the target loss over ours."""
TARGET_LOSS = 2.65
"""Runs reach it after about two thirds of the steps, where the loss still falls by more than runs differ."""
SEEDS = (1, 2, 3)
MODEL: dict[str, Any] = {"width": 128, "layers": 5, "batch": 2}
TRAINING: dict[str, Any] = {**MODEL, "steps": 80, "validate_every": 3, "validation_batch": 32}
BUCKETS_MB = (25.0, 2.0, 0.7)  # one bucket, three, seven
SIFTING_STEPS, TUNING_STEPS = 7, 15
FINALISTS = 4

LOSS_BOUND = 0.03
BEST_GLOO, RELIABLE, BOUNDED, PAPERS = "gloo", "commlayer, reliable", "commlayer, bounded", "papers' rule"
POLICIES: dict[str, dict[str, Any]] = {
    RELIABLE: {},
    BOUNDED: {"loss_bound": LOSS_BOUND, "treatment": "feedback"},
    PAPERS: {"loss_bound": LOSS_BOUND, "treatment": "zero", "partial_results": True},
}


def step_s(log: Log) -> float:
    """Median step, without the warm-up."""
    return float(statistics.median(log["step_s"][WARM_UP_STEPS:]))


def best(logs: Sequence[Log]) -> Log:
    """The log with the shortest step."""
    return min(logs, key=step_s)


def time_to_loss(log: Log, target: float) -> float | None:
    """Seconds of training until the first validation at or under the target; None if there was none."""
    return next((seconds for _, seconds, loss in log["validations"] if loss <= target), None)


def limit_step_s(log: Log, scenario: Scenario) -> float:
    """Step time of a transport that fills the busiest link with the same bytes and overlaps with all of backward.

    The all-reduce sends and receives 2 (n-1)/n of the gradients; traffic from outside the job is subtracted from the
    busiest host's link. Forward and update do not overlap with anything.
    """
    n, rate = log["ranks"], scenario.payload_gb_s
    assert rate is not None
    others = max((taken(scenario, host) for host in range(scenario.hosts)), default=0.0)
    bytes_sent = 2 * (n - 1) / n * log["parameters"] * (4 if log["job"]["bits"] == "f32" else 2)
    transfer_s = bytes_sent / (rate * 1e9 * (1 - others))
    return float(log["forward_s"] + max(log["backward_s"], transfer_s) + log["update_s"])


def limit_of(content: dict[str, Any]) -> float:
    """Limit of a scenario: median over all runs, which compute the same."""
    network = Scenario.from_table(content["network"])
    return statistics.median(limit_step_s(log, network) for log in content["runs"])


def taken(scenario: Scenario, host: int) -> float:
    """Share of a host's link that traffic of others takes."""
    rate_bps = scenario.link(host).rate_bps
    bursts = sum(
        burst.senders * burst.burst_bytes * 8 / (burst.period_ms / 1e3) for burst in scenario.incast if burst.to == host
    )
    return bursts / rate_bps + sum(flow.share for flow in scenario.cross if flow.to == host) if rate_bps else 0.0


@dataclass(frozen=True)
class System:
    """What one system's runs of a scenario show, in the order of the seeds."""

    logs: list[Log]

    @property
    def configuration(self) -> str:
        job = self.logs[0]["job"]
        parts = [job["tcp_cc"], job["bits"], f"buckets of {job['bucket_mb']:g} MB"]
        if bound := (job["policy"] or {}).get("loss_bound"):
            parts.insert(0, f"loss bound {bound:.0%}")
        return ", ".join(part for part in parts if part)

    def times(self, target: float) -> list[float] | None:
        """The times to the target loss; None when a run did not reach it."""
        times = [time_to_loss(log, target) for log in self.logs]
        return [time for time in times if time is not None] if None not in times else None

    @property
    def final(self) -> list[float]:
        return [log["validations"][-1][2] for log in self.logs]

    @property
    def step_s(self) -> float:
        return statistics.median(step_s(log) for log in self.logs)

    @property
    def computing_s(self) -> float:
        """The time of a step without communication."""
        return float(statistics.median(log["forward_s"] + log["backward_s"] + log["update_s"] for log in self.logs))


def systems(runs: Sequence[Log]) -> dict[str, System]:
    """The systems by name, each with the seeds that all have."""
    by_name: dict[str, dict[int, Log]] = {}
    for log in runs:
        by_name.setdefault(log["job"]["system"], {})[log["job"]["seed"]] = log
    seeds = sorted(set.intersection(*(set(of_system) for of_system in by_name.values()))) if by_name else []
    return {name: System([of_system[seed] for seed in seeds]) for name, of_system in by_name.items()} if seeds else {}


@dataclass(frozen=True)
class Verdict:
    """One of our systems against the best gloo."""

    ratios: list[float]
    """The ratios of the times to the target loss, by seed; empty when one of them did not reach it."""
    differences: list[float]
    """The differences of the final losses, paired by seed."""
    noise: float
    """Standard deviation of the best gloo's final loss over the seeds."""

    @staticmethod
    def of(system: System, gloo: System, target: float) -> Verdict:
        ours, theirs = system.times(target), gloo.times(target)
        ratios = [] if ours is None or theirs is None else [t / o for t, o in zip(theirs, ours, strict=True)]
        differences = [o - t for o, t in zip(system.final, gloo.final, strict=True)]
        return Verdict(ratios, differences, statistics.stdev(gloo.final) if len(gloo.final) > 1 else 0.0)

    @property
    def same_loss(self) -> bool:
        """Worse by no more than the seeds make."""
        return statistics.fmean(self.differences) <= self.noise

    def reached(self, ratio: float) -> bool:
        return bool(self.ratios) and statistics.median(self.ratios) >= ratio and self.same_loss


def table(content: dict[str, Any]) -> str:
    """The page's tables, as Markdown: only from the results and the targets."""
    parts = []
    for name, ratio in TARGETS.items():
        scenario = content["scenarios"].get(name)
        found = systems(scenario["runs"]) if scenario else {}
        if scenario is None or BEST_GLOO not in found:
            parts += [f"### {name}", f"Not measured: `python -m bench.time_to_loss --only {name}`."]
        else:
            parts += [f"### {name}", *_scenario(scenario, found, ratio)]
    return "\n\n".join(parts)


def _scenario(content: dict[str, Any], found: dict[str, System], ratio: float) -> list[str]:
    target, gloo, limit_s = content["target_loss"], found[BEST_GLOO], limit_of(content)
    columns = ["system", "configuration", "step (ms)", "share of the limit", "not counted", "time to loss (s)", "ratio"]
    columns += ["final loss", "difference", "target", "reached"]
    rows = []
    for name, system in found.items():
        times = system.times(target)
        cells = [
            name,
            system.configuration,
            f"{system.step_s * 1e3:.0f}",
            f"{limit_s / system.step_s:.0%}",
            f"{statistics.fmean(log['uncounted_share'] for log in system.logs):.2%}",
            _spread(times, ".1f") if times else "not reached",
        ]
        verdict = Verdict.of(system, gloo, target)
        if system is gloo:
            cells += ["1", _spread(system.final, ".4f"), "", "", ""]
        else:
            difference = f"{statistics.fmean(verdict.differences):+.4f}"
            cells += [
                _spread(verdict.ratios, ".2f") if verdict.ratios else "-",
                _spread(system.final, ".4f"),
                difference,
            ]
            cells += [f"≥ {ratio:g}x", "yes" if verdict.reached(ratio) else "**no**"] if name == BOUNDED else ["", ""]
        rows.append(cells)
    return [markdown(columns, rows), *_sentences(content, found)]


def _spread(values: Sequence[float], form: str) -> str:
    """Median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _sentences(content: dict[str, Any], found: dict[str, System]) -> list[str]:
    network, gloo = Scenario.from_table(content["network"]), found[BEST_GLOO]
    limit_s = limit_of(content)
    noise = statistics.stdev(gloo.final) if len(gloo.final) > 1 else 0.0
    first = gloo.logs[0]
    sifted = ", ".join(
        f"{log['job']['tcp_cc']} {log['job']['bits']} {log['job']['bucket_mb']:g} MB {step_s(log) * 1e3:.0f} ms"
        for log in sorted(content["tuning"], key=step_s)
        if log["job"]["system"] == BEST_GLOO
    )
    drift = [name for name, system in found.items() if not all(log["replicas_identical"] for log in system.logs)]
    identical = "in every run" if not drift else f"except with {', '.join(drift)}"
    windows = first["ranks"] * first["job"]["batch"]
    timing = (
        f"Time to a validation loss of {content['target_loss']:g}, median of {len(gloo.logs)} seeds (range). Of the "
        f"best gloo's step {1 - gloo.computing_s / gloo.step_s:.0%} is waiting for communication. The limit is a "
        f"transport that fills the busiest link exactly with the same bytes and overlaps with all of backward: a step "
        f"of {limit_s * 1e3:.0f} ms, so none can be more than {gloo.step_s / limit_s:.2f}x as fast as the best gloo."
    )
    losses = (
        f"Final losses after {first['job']['steps']} steps; gloo's has a standard deviation of {noise:.4f} from seed "
        f"to seed, and a mean that is worse by more would not count as the same loss. Replicas were bit-identical at "
        f"the end {identical}."
    )
    conditions = (
        f"{first['parameters']:,} parameters, {first['ranks']} ranks, {windows} windows of {first['job']['context']} "
        f"bytes a step. Network: {network}. {measured_on(content, 'time_to_loss')}"
    )
    return [timing, losses, f"gloo as tuned (medians): {sifted}.", conditions]


def gloo_jobs(buckets_mb: Sequence[float] = BUCKETS_MB) -> list[Job]:
    """Every variant of the baseline, for the first, short tuning."""
    return [
        Job(BEST_GLOO, "gloo", tcp_cc, bits, None, bucket_mb, steps=SIFTING_STEPS, **MODEL)
        for bits, tcp_cc, bucket_mb in itertools.product(("f32", "f16", "bf16"), ("cubic", "bbr"), buckets_mb)
    ]


def our_jobs(bits: str, buckets_mb: Sequence[float] = BUCKETS_MB) -> list[Job]:
    """Every bucket size of each of our systems."""
    return [
        Job(name, "commlayer", None, bits, policy, bucket_mb, steps=TUNING_STEPS, **MODEL)
        for name, policy in POLICIES.items()
        for bucket_mb in buckets_mb
    ]


def finalists(logs: Sequence[Log]) -> list[Job]:
    """The better variants, to run again with more steps."""
    return [dataclasses.replace(Job(**log["job"]), steps=TUNING_STEPS) for log in sorted(logs, key=step_s)[:FINALISTS]]


def tune(
    run: Callable[[str, list[Job]], list[Log]], buckets_mb: Sequence[float] = BUCKETS_MB
) -> tuple[list[Job], list[Log]]:
    """The best configuration of each system, gloo first, and the logs of the tuning.

    `run(name, jobs)` returns the jobs' logs. Raises BenchError if no job of a system ran.
    """
    sifted = run("sift", gloo_jobs(buckets_mb))
    tuned = run("gloo", finalists(sifted))
    if not tuned:
        raise BenchError("no form of gloo ran")
    chosen = [best(tuned)]
    ours = run("ours", our_jobs(chosen[0]["job"]["bits"], buckets_mb))
    for name in POLICIES:
        of_name = [log for log in ours if log["job"]["system"] == name]
        if not of_name:
            raise BenchError(f"{name} did not run")
        chosen.append(best(of_name))
    return [Job(**log["job"]) for log in chosen], sifted + tuned + ours


def in_turns(chosen: Sequence[Job], seeds: Sequence[int], training: dict[str, Any]) -> list[Job]:
    """Every system with every seed. Each seed begins with another system."""
    return [
        dataclasses.replace(job, seed=seed, **training)
        for number, seed in enumerate(seeds)
        for job in rotated(chosen, number)
    ]


def measure_scenario(name: str, *, quick: bool) -> dict[str, Any]:
    """Tunes and trains. Raises BenchError if a job did not run."""
    scenario, about = Scenario.read(name), machine.facts()

    def run(stage: str, jobs: list[Job]) -> list[Log]:
        print(f"## {name}: {stage}, {len(jobs)} jobs", flush=True)
        return measure(scenario, jobs, LOGS, name=f"{name}.{stage}")

    chosen, tuning = tune(run, BUCKETS_MB[:1] if quick else BUCKETS_MB)
    training = TRAINING | ({"steps": 12} if quick else {})
    jobs = in_turns(chosen, SEEDS[:1] if quick else SEEDS, training)
    runs = run("training", jobs)
    if len(runs) < len(jobs):
        raise BenchError(f"{name}: only {len(runs)} of {len(jobs)} runs ended")
    order = {job.system: i for i, job in enumerate(chosen)}
    runs.sort(key=lambda log: order[log["job"]["system"]])
    return {
        "network": scenario.table,
        "target_loss": runs[0]["validations"][-1][2] + 0.1 if quick else TARGET_LOSS,
        "tuning": tuning,
        "runs": runs,
        "machine": about,
        "measured": today(),
    }


def is_reached(content: Content) -> bool:
    """Whether every target is reached that was measured."""
    for name, scenario in content["scenarios"].items():
        found = systems(scenario["runs"])
        if not Verdict.of(found[BOUNDED], found[BEST_GLOO], scenario["target_loss"]).reached(TARGETS[name]):
            return False
    return True


BENCHMARK = Benchmark(
    RESULTS, PAGE, lambda content: {"results": table(content)}, {"schema": 1, "scenarios": {}}, is_good=is_reached
)


def main() -> int:
    """0 if every target measured so far is reached, 1 if one is not, 2 if a run failed."""
    quick = "one seed, few steps, one bucket size"
    asked = options(__doc__, only=TARGETS, quick=quick, table=True).parse_args()

    def measure(content: Content, name: str) -> None:
        content["scenarios"][name] = measure_scenario(name, quick=asked.quick)

    return BENCHMARK.main(asked, asked.only or TARGETS, measure)


if __name__ == "__main__":
    sys.exit(main())
