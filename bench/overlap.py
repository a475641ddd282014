"""Step time of DDP when gradients travel during the next forward pass.

    python -m bench.overlap --ddp                     everything (about 8 minutes; the links need root)
    python -m bench.overlap --ddp --rounds 9          more rounds
    python -m bench.overlap --ddp --slower 2          half the link rate, twice the time per layer: half the CPU share
    python -m bench.overlap --ddp --quick             one round of few steps; keeps nothing
    python -m bench.overlap --trace out.json          a step of `overlap`, beside the model's; keeps nothing
    python -m bench.overlap --table                   only the table of the kept results

The accelerator is a sleep: every layer sleeps in its forward pass and twice as long in its backward pass. Collectives
are real, between emulated hosts. The layers are as large as makes an ideal transport's communication as long as
forward and backward. The systems run in turns; each round begins with another one. First, each stock DDP is tuned by
its bucket size, and gloo by TCP's congestion control.

Two systems have the hooks of `overlap` on a network that sends in order: on commlayer with one class, and on gloo. Two
more reduce as DeAR does (`bench/jobs/dear.py`), in order as well. `bench/jobs/ddp_model.py` predicts all steps, from
costs that are measured first. `bench/jobs/data_parallel.py` has the systems.

Two cores run four hosts, so what this measures is order, moments of launch and waits. It prints the busy share of the
machine's CPU beside each row, and a row above 25 % is void. Writes bench/results/overlap.json, the table of
docs/overlap.md and docs/overlap_ddp.png.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import turns
from bench.harness.bars import Bar, draw
from bench.harness.driver import Benchmark
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import PAGE, ROOT, Log, by_system, in_turns, slowed, spread, step_s
from bench.jobs import ddp_model
from bench.jobs.data_parallel import (
    COSTS,
    COSTS_GLOO,
    DEAR,
    DEAR_GLOO,
    FIFO,
    FORWARD_S,
    GLOO,
    HOOKS,
    LAYERS,
    ON_GLOO,
    OURS,
    STEPS,
    STOCK,
    SYSTEMS,
    Job,
    measure_costs,
    train,
)
from commlayer.scheduler.trace import write_trace
from commlayer.tools.bench import machine
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/overlap.json"
PICTURE = ROOT / "docs/overlap_ddp.png"
SCENARIO = "overlap"
ROUNDS = 6

TARGETS = {GLOO: 1.20, STOCK: 1.20, HOOKS: 1.10, FIFO: 1.10}
"""The ratio of a system's step to ours."""


def width_of(scenario: Scenario, forward_s: float = FORWARD_S) -> int:
    """Width of the layers, with which communication at the link's rate is as long as forward and backward."""
    rate, hosts = scenario.payload_gb_s, scenario.hosts
    assert rate is not None
    sent = rate * 1e9 * 3 * forward_s  # bytes sent during one layer's forward and backward
    return int((sent * hosts / (2 * (hosts - 1)) / 4) ** 0.5)


def ideal_s(job: Job) -> float:
    """Seconds of a step on an ideal network, whose communication takes as long as forward and backward.

    In order, the front layers' bucket comes last, so the next forward pass begins when all communication is over. That
    begins when the backward pass has filled the first bucket. By next use, the front layers' bucket overtakes, and only
    its own time is added to forward and backward.
    """
    return model_s(job, ddp_model.ideal(LAYERS, job.forward_s))


def model_s(job: Job, costs: ddp_model.Costs) -> float:
    """Seconds of a step, from these costs."""
    return ddp_model.predict(SYSTEMS[job.system], LAYERS, job.layers_per_bucket, costs).step_s


def run_job(given: Log, content: Log) -> Log:
    """A job on each rank."""
    job = Job(**given)
    return (measure_costs if job.system in (COSTS, COSTS_GLOO) else train)(job, content["width"])


def measure(scenario: Scenario, jobs: Sequence[Job], name: str) -> list[Log]:
    """Runs the jobs in the emulated network. Raises BenchError if a rank failed."""
    request = {"width": width_of(scenario, jobs[0].forward_s), "jobs": [dataclasses.asdict(job) for job in jobs]}
    return turns.measure(scenario, "bench.overlap", request, name)


def tuned(scenario: Scenario, forward_s: float, *, short: bool) -> tuple[list[Job], list[Log]]:
    """The systems, each stock DDP with its best bucket size, gloo with its best TCP; and the logs of the tuning."""
    sizes = (1,) if short else (1, 2, 4)
    ccs = (None,) if short else scenario.tcp_congestion_control
    steps = 2 if short else 3
    jobs = [Job(GLOO, size, cc, steps, forward_s) for size in sizes for cc in ccs]
    jobs += [Job(STOCK, size, None, steps, forward_s) for size in sizes]
    jobs += [Job(system, 1, cc, steps, forward_s) for system in (DEAR_GLOO, HOOKS) for cc in ccs]
    logs = measure(scenario, jobs, "tuning")
    chosen = []
    for system in (GLOO, STOCK, DEAR_GLOO, HOOKS):
        best = min((log for log in logs if log["job"]["system"] == system), key=step_s)
        chosen.append(dataclasses.replace(Job(**best["job"]), steps=steps if short else STEPS))
    others = (Job(system, steps=steps if short else STEPS, forward_s=forward_s) for system in (DEAR, FIFO, OURS))
    return [*chosen, *others], logs


class Measured:
    """The kept results."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content, self.logs = content, by_system(content["runs"])
        self.ours = [step_s(log) for log in self.logs[OURS]]

    @property
    def systems(self) -> list[str]:
        return [system for system in SYSTEMS if system in self.logs]

    def job(self, system: str) -> Job:
        return Job(**self.logs[system][0]["job"])

    def steps(self, system: str) -> list[float]:
        """The steps by round."""
        return [step_s(log) for log in self.logs[system]]

    def model_s(self, system: str) -> float | None:
        """The predicted step; None: the costs were not measured."""
        costs = self.content.get("costs", {}).get("gloo" if system in ON_GLOO else "commlayer")
        return None if costs is None else model_s(self.job(system), ddp_model.Costs.from_table(costs))

    def error_cell(self, system: str) -> str:
        """The step over the model's."""
        predicted_s = self.model_s(system)
        if predicted_s is None:
            return ""
        ratio = statistics.median(self.steps(system)) / predicted_s
        return f"{ratio:.3f}" + " (**no**)" * (abs(ratio - 1) > ddp_model.ERROR_MAX)


def row_of(measured: Measured, system: str) -> list[str]:
    """A row of the table."""
    logs, ours, job = measured.logs[system], measured.logs[OURS], measured.job(system)
    steps, predicted_s = measured.steps(system), measured.model_s(system)
    ratios = [one / other for one, other in zip(steps, measured.ours, strict=True)]
    limit, target = ideal_s(job) / ideal_s(measured.job(OURS)), TARGETS.get(system)
    return [
        system,
        ", ".join(filter(None, [f"{job.layers_per_bucket} layers per bucket", job.tcp_cc])),
        spread(steps, 1e3, ".0f"),
        f"{ideal_s(job) * 1e3:.0f}",
        "" if predicted_s is None else f"{predicted_s * 1e3:.0f}",
        measured.error_cell(system),
        turns.busy_cell(logs),
        "" if system == OURS else spread(ratios, 1, ".3f"),
        "" if system == OURS else (f"≥ {target:.2f} " if target else "") + f"(limit {limit:.2f})",
        "" if target is None else turns.verdict(statistics.median(ratios) >= target, logs, ours),
    ]


def table(content: dict[str, Any]) -> str:
    """The page's table, as Markdown: only from the results and the targets."""
    measured = Measured(content)
    columns = ["system", "configuration", "step (ms)", "ideal (ms)", "model (ms)", "step / model", "CPU busy"]
    columns += ["its step / ours", "target", "reached"]
    rows = [row_of(measured, system) for system in measured.systems]
    network, forward_ms = Scenario.from_table(content["network"]), measured.job(OURS).forward_s * 1e3
    conditions = (
        f"{LAYERS} equal layers of {content['width']}x{content['width']} values, {forward_ms:g} ms forward and "
        f"{2 * forward_ms:g} ms backward each, by sleeping. Network: {network}. Ideal: without any overhead. Model: "
        f"from measured costs; **no**: more than {ddp_model.ERROR_MAX:.0%} off. "
        f"{turns.about_rounds(len(measured.ours))} CPU: the largest share of any round. "
        f"{measured_on(content, 'overlap')}"
    )
    return f"{markdown(columns, rows)}\n\n{conditions}"


def picture(content: dict[str, Any]) -> None:
    """Draws the steps, beside the model's."""
    measured = Measured(content)
    bars = []
    for system in measured.systems:
        steps, job = measured.steps(system), measured.job(system)
        bars.append(Bar.of(system, steps, measured.model_s(system), ideal_s(job), is_ours=system == OURS))
    draw({"DDP, communication as long as computation": bars}, PICTURE)


def measure_ddp(count: int, slower: float, *, short: bool) -> dict[str, Any]:
    """Tunes and measures, in `count` rounds. Raises BenchError if a rank failed."""
    scenario, about = slowed(Scenario.read(SCENARIO), slower), machine.facts()
    jobs, tuning = tuned(scenario, FORWARD_S * slower, short=short)
    first = [Job(COSTS_GLOO, 1, jobs[0].tcp_cc, 2, FORWARD_S * slower), Job(COSTS, 1, None, 2, FORWARD_S * slower)]
    of_gloo, of_commlayer, *runs = measure(scenario, [*first, *in_turns(jobs, count)], "runs")
    return {
        "schema": 1,
        "network": scenario.table,
        "width": width_of(scenario, FORWARD_S * slower),
        "tuning": tuning,
        "costs": {"gloo": of_gloo["costs"], "commlayer": of_commlayer["costs"]},
        "runs": runs,
        "machine": about,
        "measured": today(),
    }


def trace(slower: float, path: Path) -> None:
    """Writes the last measured step of `overlap` on all ranks, and beside it the model's."""
    scenario, forward_s = slowed(Scenario.read(SCENARIO), slower), FORWARD_S * slower
    first, log = measure(scenario, [Job(COSTS, 1, None, 2, forward_s), Job(OURS, 1, None, 2, forward_s, True)], "trace")
    model = ddp_model.predict(SYSTEMS[OURS], LAYERS, 1, ddp_model.Costs.from_table(first["costs"]))
    write_trace(path, {"measured": turns.last_step(log), "model": turns.steady_step(model)})


def main() -> int:
    """0; ends with 2 if a run failed."""
    parser = turns.parser(__doc__, ROUNDS)
    parser.add_argument("--ddp", action="store_true", help="measure DDP")
    turns.add_trace(parser)
    arguments = parser.parse_args()
    if not (arguments.rank or arguments.ddp or arguments.table or arguments.trace):
        parser.error("name a case: --ddp")
    benchmark = Benchmark(RESULTS, PAGE, lambda found: {"ddp": table(found)}, picture=picture)
    return turns.main(arguments, benchmark, measure_ddp, run_job, backend=lambda job: Job(**job).backend, trace=trace)


if __name__ == "__main__":
    sys.exit(main())
