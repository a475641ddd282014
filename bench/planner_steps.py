"""Steps that `planner.search` predicts on a cluster, beside the measured steps of the same plans.

    python -m bench.planner_steps                  8 minutes; the links need root
    python -m bench.planner_steps --only half      one case: half, unseen
    python -m bench.planner_steps --rounds 5       more rounds
    python -m bench.planner_steps --quick          one round; keeps nothing
    python -m bench.planner_steps --table          only the table of the kept results

Two hosts of two ranks, the second host slower; within a host, shared memory, between them a slow link. The
costs are measured first, by `pipeline.measure`, on a job that is none of the plans: each layer is a stage, and all
ranks have the same speed. Then the search predicts all its plans with one bucket per stage, and the best one of each of
the 12 kinds runs as it is: `pipeline.of_plan` makes its schedule, `pipeline.attach` reduces its gradients. Computation
is a sleep (`bench/jobs/planned.py`). Writes bench/results/planner_steps.json and the table of docs/planner.md.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from typing import Any, NamedTuple

from bench.harness import turns
from bench.harness.driver import Benchmark, Content
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import ROOT, by_system, in_turns, step_s
from bench.jobs.pipelines import costs_of
from bench.jobs.planned import COSTS, FORWARD, MICROBATCHES, train
from commlayer.planner import Cluster, Link, Links, Plan, Rank, search
from commlayer.planner.costs import Costs
from commlayer.tools.bench import machine
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/planner_steps.json"
PAGE = ROOT / "docs/planner.md"


class Case(NamedTuple):
    """Two hosts of two ranks, and the link between them."""

    speed: float
    """Of the ranks of the second host, relative to the first one's."""
    rate_bps: float

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of all ranks."""
        return (1.0, 1.0, self.speed, self.speed)


CASES = {"half": Case(0.5, 40e6), "unseen": Case(0.7, 80e6)}
"""The model was corrected after the first run of `half`, in which two plans were predicted 18 % too slow. It had not
been changed since when `unseen` was run for the first time."""
WITHIN = Link(8e9)
"""Shared memory, as `commlayer bench` finds it between two ranks: it does not matter here, by far."""
ROUNDS = 2
KINDS = 12
NEAR = 1.05
"""A plan within 5 % of the fastest is as good."""
CALIBRATION = {
    "ranks": 4,
    "replicas": 1,
    "microbatches": MICROBATCHES,
    "chunks": 2,
    "mode": "step",
    "cuts": list(range(len(FORWARD) + 1)),
    "outer": "stages",
}


def scenario_of(case: Case) -> Scenario:
    """The two hosts."""
    scenario = Scenario.read("overlap")
    nics = tuple(dataclasses.replace(nic, rate_bps=case.rate_bps) for nic in scenario.nics)
    return dataclasses.replace(scenario, hosts=2, ranks_per_host=2, nics=nics)


def cluster_of(case: Case, latency_s: float) -> Cluster:
    """The planner's description of the hosts, with the rate of payload that the link can carry."""
    rate = scenario_of(case).payload_gb_s
    assert rate is not None
    ranks = [Rank(speed * 1e12, 1e12) for speed in case.speeds]
    return Cluster([ranks[:2], ranks[2:]], Links(WITHIN, Link(rate * 8e9, latency_s)))


def kind(plan: Plan) -> str:
    """The name of a plan's kind."""
    choice = plan.choice
    placed = "" if 1 in (choice.ranks, choice.replicas) else f", neighbours are {_neighbours(choice.outer)}"
    order = "1F1B" if choice.chunks == 1 else f"AIAO, {choice.chunks} chunks"
    mode = f", {choice.reduction.mode}" if choice.replicas > 1 else ""
    return f"{choice.ranks} x {choice.replicas}{placed}, {order}{mode}"


def _neighbours(outer: str) -> str:
    return "replicas" if outer == "stages" else "stages"


def chosen(costs: Costs, cluster: Cluster) -> dict[str, Plan]:
    """The fastest plan of each kind, by prediction."""
    plans = search(costs, ranks=cluster, microbatches=MICROBATCHES, buckets=(1,), chunks=(1, 2), keep=10_000)
    found: dict[str, Plan] = {}
    for plan in plans:
        if plan.choice.chunks == 1 or (plan.choice.group is None and plan.choice.ranks > 1):
            found.setdefault(kind(plan), plan)
    return found


def table_of(plan: Plan) -> dict[str, Any]:
    """The plan of a job, see `planned.plan_of`."""
    choice = plan.choice
    return {
        **{name: getattr(choice, name) for name in ("ranks", "replicas", "microbatches", "chunks", "outer")},
        "mode": choice.reduction.mode,
        "cuts": list(choice.cuts),
    }


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The results of a case. Raises BenchError if a rank failed."""
    about, scenario = machine.facts(), scenario_of(case)
    request: dict[str, Any] = {"speeds": case.speeds, "jobs": [{"system": COSTS, "plan": CALIBRATION}]}
    (log,) = turns.measure(scenario, "bench.planner_steps", request, "planner-costs")
    costs = costs_of(log["costs"])
    plans = chosen(costs, cluster_of(case, costs.link.latency_s))
    jobs = [{"system": name, "plan": table_of(plan)} for name, plan in plans.items()]
    request["jobs"] = in_turns(jobs, rounds)
    runs = turns.measure(scenario, "bench.planner_steps", request, "planner-steps")
    return {
        "case": case._asdict(),
        "network": scenario.table,
        "costs": log["costs"],
        "predicted_s": {name: plan.step_s for name, plan in plans.items()},
        "runs": runs,
        "machine": about,
        "measured": today(),
    }


def table(content: dict[str, Any]) -> str:
    """The table of a case, as Markdown."""
    case = Case(**content["case"])
    measured = {name: [step_s(log) for log in logs] for name, logs in by_system(content["runs"]).items()}
    medians = {name: statistics.median(steps) for name, steps in measured.items()}
    busy = {name: max(log["busy"] for log in logs) for name, logs in by_system(content["runs"]).items()}
    columns = ["plan: ranks of a pipeline x replicas", "predicted", "measured", "predicted / measured", "CPU busy"]
    rows = []
    for name, predicted_s in content["predicted_s"].items():
        steps = measured[name]
        span = f"{medians[name] * 1e3:.0f} ms ({min(steps) * 1e3:.0f} to {max(steps) * 1e3:.0f})"
        ratio = predicted_s / medians[name]
        rows.append([name, f"{predicted_s * 1e3:.0f} ms", span, f"{ratio:.3f}", f"{busy[name]:.0%}"])
    errors = [abs(content["predicted_s"][name] / medians[name] - 1) for name in medians]
    pick, fastest = next(iter(content["predicted_s"])), min(medians, key=lambda name: medians[name])
    rounds = len(measured[pick])
    near = medians[pick] / medians[fastest]
    conditions = (
        f"Ranks of the second host at {case.speed:g} of the speed, {case.rate_bps / 1e6:g} Mbit/s between the "
        f"hosts. Largest error {max(errors):.1%}, median {statistics.median(errors):.1%}; "
        f"{sum(error <= 0.1 for error in errors)} of {len(errors)} within 10 %. The planner's choice, the first "
        f"row, took {near:.2f} times the fastest measured one ({fastest}): "
        f"{'reached' if near <= NEAR else 'not reached'} (within {NEAR:.2f}). Median of {rounds} rounds (range). "
        f"{measured_on(content, 'planner_steps')}"
    )
    return f"{markdown(columns, rows)}\n\n{conditions}"


def page_of(content: Content) -> dict[str, str]:
    """The tables of all cases."""
    return {"steps": "\n\n".join(table(case) for case in content["cases"].values())}


BENCHMARK = Benchmark(RESULTS, PAGE, page_of, {"schema": 1, "cases": {}})


def main() -> int:
    """0, or 2 if a run failed."""
    asked = turns.parser(__doc__, ROUNDS, only=CASES).parse_args()
    if asked.rank:
        turns.serve(asked.rank, lambda _: "commlayer", train)
        return 0

    def add(content: Content, name: str) -> None:
        content["cases"][name] = measure(CASES[name], 1 if asked.quick else asked.rounds)

    return BENCHMARK.main(asked, asked.only or CASES, add)


if __name__ == "__main__":
    sys.exit(main())
