"""Step time of a pipeline whose gradients are reduced by `commlayer.pipeline.attach`, beside torch's own schedules.

    python -m bench.overlap_pipeline                   everything (70 minutes; the links need root)
    python -m bench.overlap_pipeline --only small      one case: large (8 ranks, 35 minutes), small (4 ranks, 19) or
                                                       sweep (12)
    python -m bench.overlap_pipeline --rounds 9        more rounds
    python -m bench.overlap_pipeline --slower 2        half the link rate, twice the time per chunk: half the CPU share
    python -m bench.overlap_pipeline --quick           one round of the small case with quick chunks; keeps nothing
    python -m bench.overlap_pipeline --trace out.json  a step of the small case, beside the model's; keeps nothing
    python -m bench.overlap_pipeline --table           only the tables and the picture of the kept results

The accelerator is a sleep: every chunk sleeps in its forward pass and twice as long in its backward pass. Messages
between stages and reductions are real, between emulated hosts. The parameters are as large as makes the reductions a
given share of the step of serial 1F1B. The systems run in turns; each round begins with another one.
`bench/jobs/pipelines.py` has the systems, `bench/jobs/pipeline_model.py` their predictions from costs that
`commlayer.pipeline.measure` finds first.

Two cores run all hosts, so the CPU's busy share is beside each row, and a row above 25 % is void. Writes
bench/results/overlap_pipeline.json, the tables of docs/overlap.md and docs/overlap_pipeline.png.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import turns
from bench.harness.driver import Benchmark, Content
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import PAGE, ROOT, Log, by_system, in_turns, spread, step_s
from bench.jobs import pipeline_sweep
from bench.jobs.pipeline_model import exposed, ideal, limit, predict, reduction_s
from bench.jobs.pipelines import (
    BUCKETS,
    CONTROL,
    COSTS,
    DEFERRED,
    FIFO,
    FIFO_CUBIC,
    FIFO_GLOO,
    FSDP_INTERLEAVED,
    FSDP_LOOPED,
    SERIAL,
    STALE,
    SYSTEMS,
    UNDEFERRED,
    Case,
    costs_of,
    train,
)
from commlayer.planner.costs import Costs
from commlayer.scheduler.trace import Span, write_trace
from commlayer.tools.bench import machine
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/overlap_pipeline.json"
SCENARIO = "overlap"
PICTURE = ROOT / "docs/overlap_pipeline.png"
ROUNDS = 6
LIMIT_S = 300.0

LARGE = Case("large", ranks=4, replicas=2, microbatches=16, chunks=4, forward_s=0.05, rate_bps=12.5e6, share=0.44)
SMALL = Case("small", ranks=2, replicas=2, microbatches=16, chunks=4, forward_s=0.025, rate_bps=50e6, share=0.44)
CASES = {case.name: case for case in (LARGE, SMALL)}
SWEEP = "sweep"
LEFT_OUT = {LARGE.name: {FSDP_INTERLEAVED}}
"""Slower than another stock schedule in the small case, and by the model: it would take a sixth of the time."""

STOCK = (FSDP_INTERLEAVED, FSDP_LOOPED)
FREE = (FIFO, FIFO_GLOO, FIFO_CUBIC)
TARGETS: dict[tuple[tuple[str, ...], str], float] = {
    ((SERIAL,), UNDEFERRED): 1.30,
    ((SERIAL,), DEFERRED): 1.48,
    ((SERIAL,), STALE): 1.80,
    ((BUCKETS,), UNDEFERRED): 1.30,
    ((BUCKETS,), DEFERRED): 1.45,
    (STOCK, UNDEFERRED): 1.25,
    (STOCK, DEFERRED): 1.40,
    (FREE, DEFERRED): 1.08,
}
"""The ratio of the step of the fastest of some systems to ours, in the large case."""
EXPOSED_TARGETS = {UNDEFERRED: 0.52, DEFERRED: 0.32}
"""Share of the reductions that makes the step longer, in the large case."""
ERROR_MAX = 0.10
"""The error of the model."""


def scenario_of(case: Case) -> Scenario:
    """A host for every rank."""
    scenario = Scenario.read(SCENARIO)
    nics = tuple(dataclasses.replace(nic, rate_bps=case.rate_bps) for nic in scenario.nics)
    return dataclasses.replace(scenario, hosts=case.ranks * case.replicas, nics=nics)


def slowed(case: Case, slower: float) -> Case:
    """The case with longer chunks on slower links."""
    return dataclasses.replace(case, forward_s=case.forward_s * slower, rate_bps=case.rate_bps / slower)


def job_of(system: str, *, trace: bool = False) -> dict[str, Any]:
    """One run of a system."""
    return {"system": system, "trace": trace, "tcp_cc": SYSTEMS[system].tcp_cc}


def measure(case: Case, names: Sequence[str], rounds: int, *, trace: bool = False) -> dict[str, Any]:
    """Costs, and the systems in turns. Raises BenchError if a rank failed."""
    about, scenario = machine.facts(), scenario_of(case)
    jobs = [{"system": COSTS}, *in_turns([job_of(name, trace=trace) for name in names], rounds)]
    request = {"case": dataclasses.asdict(case), "values": case.values(scenario), "jobs": jobs}
    costs, *runs = turns.measure(scenario, "bench.overlap_pipeline", request, f"pipeline-{case.name}")
    return {
        "case": request["case"],
        "network": scenario.table,
        "values": request["values"],
        "costs": costs["costs"],
        "runs": runs,
        "machine": about,
        "measured": today(),
    }


class Measured:
    """The results of one case."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.case, self.costs = Case(**content["case"]), costs_of(content["costs"])
        self.logs: dict[str, list[Log]] = by_system(content["runs"])

    def steps(self, name: str) -> list[float]:
        """The steps by round."""
        return [step_s(log) for log in self.logs[name]]

    def best_of(self, names: Sequence[str]) -> str:
        """The system with the shortest median step."""
        return min(names, key=lambda name: statistics.median(self.steps(name)))

    def unreduced(self, name: str) -> list[float]:
        """The step of the same order without reductions, by round: measured, and of all but AIAO predicted."""
        if SYSTEMS[name].order == "AIAO":
            return self.steps(CONTROL)
        free = dataclasses.replace(self.costs, link=dataclasses.replace(self.costs.link, rate_bps=float("inf")))
        return [predict(self.case, name if SYSTEMS[name].is_fsdp else SERIAL, free).step_s] * len(self.logs[name])

    def exposed(self, name: str) -> list[float]:
        """The share of the reductions that makes the step longer, by round."""
        pairs = zip(self.steps(name), self.unreduced(name), strict=True)
        return [exposed(self.case, step, unreduced, self.costs) for step, unreduced in pairs]

    def ratios(self, name: str, ours: str) -> list[float]:
        """A system's step over that of ours, by round."""
        return [one / other for one, other in zip(self.steps(name), self.steps(ours), strict=True)]


def best_ratio(case: Case, names: Sequence[str], ours: str, costs: Costs | None = None) -> float:
    """The step of the fastest of the systems over that of ours, as predicted; without costs, on an ideal network."""
    steps = {
        name: (limit(case, name) if costs is None else predict(case, name, costs)).step_s for name in (*names, ours)
    }
    return min(steps[name] for name in names) / steps[ours]


def target(case: Case, names: tuple[str, ...], ours: str) -> float:
    """The same share of the limit, in other cases than the large one."""
    return TARGETS[names, ours] / best_ratio(LARGE, names, ours) * best_ratio(case, names, ours)


def exposed_limit(case: Case, name: str) -> float:
    """The exposed share on an ideal network."""
    return exposed(case, limit(case, name).step_s, limit(case, CONTROL).step_s, ideal(case))


def exposed_target(case: Case, name: str) -> float:
    """The target as far above the limit, in other cases than the large one."""
    return EXPOSED_TARGETS[name] + exposed_limit(case, name) - exposed_limit(LARGE, name)


def rows_of(measured: Measured) -> str:
    """The table of all systems, as Markdown."""
    columns = [
        "system",
        "step (s)",
        "model (s)",
        "step / model",
        "exposed share",
        "serial / step",
        "CPU busy",
        "of ranks",
    ]
    rows = []
    for name in SYSTEMS:
        if name not in measured.logs:
            continue
        steps = measured.steps(name)
        model_s = predict(measured.case, name, measured.costs).step_s
        error = statistics.median(steps) / model_s - 1
        cells = [
            name,
            spread(steps, 1, ".2f"),
            f"{model_s:.2f}",
            f"{1 + error:.3f}" + " (**no**)" * (abs(error) > ERROR_MAX),
            "" if name == CONTROL else f"{statistics.median(measured.exposed(name)):.0%}",
            f"{statistics.median(measured.ratios(SERIAL, name)):.2f}" if SERIAL in measured.logs else "",
            turns.busy_cell(measured.logs[name]),
            f"{max(log['of_ranks'] for log in measured.logs[name]):.0%}",
        ]
        rows.append(cells)
    return markdown(columns, rows)


def verdicts_of(measured: Measured) -> str:
    """The table of targets, as Markdown."""
    columns = ["ours", "over", "ratio", "target", "limit", "model", "reached"]
    rows = []
    case = measured.case
    for names, ours in TARGETS:
        run = [name for name in names if name in measured.logs]
        if not run or ours not in measured.logs:
            continue
        best = measured.best_of(run)
        ratios, wanted = measured.ratios(best, ours), target(case, names, ours)
        cells = [
            f"`{ours}`",
            best,
            spread(ratios, 1, ".3f"),
            f"≥ {wanted:.2f}",
            f"{best_ratio(case, names, ours):.2f}",
            f"{best_ratio(case, names, ours, measured.costs):.2f}",
            turns.verdict(statistics.median(ratios) >= wanted, measured.logs[best], measured.logs[ours]),
        ]
        rows.append(cells)
    for name in EXPOSED_TARGETS:
        if not {name, CONTROL} <= measured.logs.keys():
            continue
        shares, wanted = measured.exposed(name), exposed_target(case, name)
        reduced_s, unreduced_s = (predict(case, order, measured.costs).step_s for order in (name, CONTROL))
        cells = [
            f"`{name}`",
            "exposed share of the reductions",
            spread(shares, 100, ".0f") + " %",
            f"≤ {wanted:.0%}",
            f"{exposed_limit(case, name):.0%}",
            f"{exposed(case, reduced_s, unreduced_s, measured.costs):.0%}",
            turns.verdict(statistics.median(shares) <= wanted, measured.logs[name], measured.logs[CONTROL]),
        ]
        rows.append(cells)
    return markdown(columns, rows)


def table(content: dict[str, Any]) -> str:
    """The page's tables of one case, as Markdown: only from the results and the targets."""
    measured = Measured(content)
    case, network, costs = measured.case, Scenario.from_table(content["network"]), measured.costs
    rounds = max(len(logs) for logs in measured.logs.values())
    conditions = (
        f"p = {case.ranks} ranks x {case.replicas} replicas, M = {case.microbatches}, v = {case.chunks} chunks of "
        f"{content['values']:,} parameters, {case.forward_s * 1e3:g} ms forward and {2 * case.forward_s * 1e3:g} ms "
        f"backward by sleeping; reductions are {case.share:.0%} of serial 1F1B's step. Network: {network}. Model: "
        f"from {reduction_s(case, costs):.2f} s of reductions per link and step, {costs.link.latency_s * 1e3:.1f} ms "
        f"latency and {costs.action_s * 1e3:.1f} ms per action, as measured before. Exposed: step minus that of the "
        f"same order without reductions, over the reductions. gloo runs on TCP bbr, or on cubic. "
        f"{turns.about_rounds(rounds)} CPU: the largest share of any round, of the machine and of its ranks. "
        f"{measured_on(content, 'overlap_pipeline')}"
    )
    return "\n\n".join([rows_of(measured), verdicts_of(measured), conditions])


def trace(content: dict[str, Any], name: str, path: Path) -> None:
    """Writes the measured actions of all ranks, and beside them the model's of one pipeline."""
    measured = Measured(content)
    spans = [Span(*span) for span in measured.logs[name][-1]["spans"]]
    model = predict(measured.case, name, measured.costs)
    start_s = model.step_s * 6  # a step of the steady state
    steady = [
        span._replace(start_s=span.start_s - start_s, end_s=span.end_s - start_s)
        for span in model.spans
        if start_s <= span.start_s < start_s + model.step_s
    ]
    write_trace(path, {"measured": spans, "model": steady})


def tables_of(content: Content) -> dict[str, str]:
    """By their places in the page."""
    parts = {f"pipeline-{name}": table(case) for name, case in content["cases"].items()}
    sweep = pipeline_sweep.table(SMALL, [Measured(log) for log in content.get(SWEEP, ())])
    return parts | {"pipeline-sweep": sweep}


BENCHMARK = Benchmark(
    RESULTS, PAGE, tables_of, {"schema": 1, "cases": {}}, lambda _: pipeline_sweep.plot(LARGE, PICTURE)
)


def backend_of(job: Log) -> str:
    """The process group of a job."""
    return SYSTEMS[job["system"]].backend if job["system"] in SYSTEMS else "commlayer"


def main() -> int:
    """0, or 2 if a run failed."""
    parser = turns.parser(__doc__, ROUNDS, only=[*CASES, SWEEP])
    turns.add_trace(parser)
    asked = parser.parse_args()
    if asked.rank:
        turns.serve(asked.rank, backend_of, train, LIMIT_S)
        return 0
    if asked.trace:
        trace(measure(slowed(SMALL, asked.slower), [DEFERRED], 1, trace=True), DEFERRED, asked.trace)
        return 0

    def add(content: Content, name: str) -> None:
        if asked.quick:
            short = dataclasses.replace(CASES[name], microbatches=4, forward_s=0.01)
            content["cases"][name] = measure(short, list(SYSTEMS), 1)
        elif name == SWEEP:
            points = pipeline_sweep.selection(slowed(SMALL, asked.slower))
            content[SWEEP] = [measure(case, names, min(asked.rounds, 3)) for case, names in points]
        else:
            names = [system for system in SYSTEMS if system not in LEFT_OUT.get(name, ())]
            content["cases"][name] = measure(slowed(CASES[name], asked.slower), names, asked.rounds)

    return BENCHMARK.main(asked, [SMALL.name] if asked.quick else asked.only or [*CASES, SWEEP], add)


if __name__ == "__main__":
    sys.exit(main())
