"""Seconds per step with local steps on slow links, beside DDP on gloo at its best and on commlayer's hook.

    python -m bench.local_steps                 all links (about 20 minutes; the links need root)
    python -m bench.local_steps --only 20       one rate in Mbit/s, merged into the kept results
    python -m bench.local_steps --only 8x2      8 sites of 2 ranks, 20 and 1,000 Mbit/s, 100 ms there and back, 1 % loss
    python -m bench.local_steps --only speeds   4 sites of speeds 1, 1, 1 and 1/2 at 20 Mbit/s
    python -m bench.local_steps --only stalls   4 sites at 20 Mbit/s, of which one stalls now and then, for 2 s
    python -m bench.local_steps --only exact    where `auto` stays exact: 4 sites at 200 Mbit/s, beside DDP's hook
    python -m bench.local_steps --only torchft  beside torchft's DiLoCo and LocalSGD on gloo, 20 Mbit/s, in the
                                                environment .venv-hosts/torchft of the Makefile
    python -m bench.local_steps --train         trainings end to end at 20 and 100 Mbit/s (6 minutes)
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
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench import local_loss
from bench.harness import turns
from bench.harness.driver import Benchmark, Content
from bench.harness.options import options
from bench.harness.page import markdown, measured_on
from bench.harness.results import read_results, today
from bench.harness.turns import ROOT, Log, by_system, in_turns
from bench.jobs import training
from bench.jobs.local_steps import STALL_EVERY, Job, train
from bench.jobs.torchft_sites import DILOCO, LOCAL_SGD
from commlayer.tools.bench import machine
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/local_steps.json"
PAGE = ROOT / "docs/local_bench.md"
MODULE = "bench.local_steps"

RATES_MBIT_S = (20, 100, 200, 1000)
SITES_OF_TWO = "8x2"
SITES_OF_TWO_RATES = (20, 1000)
SPEEDS = "speeds"
STALLS = "stalls"
EXACT = "exact"
EXACT_RATE = 200
TORCHFT = "torchft"
CASES = (*map(str, RATES_MBIT_S), SITES_OF_TWO, SPEEDS, STALLS, EXACT)
ROUNDS = 3
HOSTS = 4

ALONE, HOOK, LOCAL_AUTO = "computation alone", "hook", "local, auto"
AUTO, STATE = f"{HOOK}, auto", f"{HOOK}, auto with state"
LOCAL_CODEC = f"{LOCAL_AUTO}, with the hook's auto"
"""`every="auto"` whose exact steps have the policy of the hook: where H is 1, its steps are those of the hook."""
EVERY = (1, 4, 8, 16, 32, 64)
PERIODS = (8, 16, 32)
STEADY: dict[str, Any] = {"warm_up": 22, "steps": 24}
"""Of all that have the hook's `auto`, which has tried its candidates by then. Some later steps are trials of other
codecs: a shorter window may have none of them."""


def jobs_of() -> list[Job]:
    """All systems."""
    return [
        Job(ALONE, is_alone=True),
        Job("gloo, cubic f32", "gloo", "cubic", warm_up=3, steps=4),
        *(Job(f"gloo, {cc} bf16", "gloo", cc, "bf16", warm_up=3) for cc in ("cubic", "bbr")),
        Job(AUTO, policy={"codec": "auto"}, **STEADY),
        Job(STATE, policy={"codec": "auto", "allow_state": True, "exact_steps": 3}, **STEADY),
        Job(LOCAL_AUTO, local={"every": "auto"}, warm_up=8, steps=24),
        Job(LOCAL_CODEC, policy={"codec": "auto"}, local={"every": "auto"}, **STEADY),
        *(Job(name_of(h), local={"every": h, "fragments": min(4, h)}, warm_up=1, steps=24) for h in EVERY),
        *(Job(f"LocalSGD on gloo, H {h}", "gloo", "cubic", period=h, warm_up=1, steps=2 * h) for h in PERIODS),
    ]


def jobs_of_two() -> list[Job]:
    """The systems of the sites of two ranks."""
    common: dict[str, Any] = {"step_s": 0.28, "ranks_per_host": 2}
    return [
        Job(ALONE, is_alone=True, **common),
        Job(LOCAL_AUTO, local={"every": "auto"}, warm_up=8, steps=24, **common),
        *(Job(name_of(h), local={"every": h}, warm_up=1, steps=24, **common) for h in (8, 32)),
    ]


EQUAL, UNEVEN = "equal steps", "uneven steps"


def jobs_of_speeds() -> list[Job]:
    """Sites of which one has half the speed of the others: all make as many steps, or each as many as it can."""
    given: dict[str, Any] = {"speeds": (1.0, 1.0, 1.0, 0.5), "steps": 192, "warm_up": 12}
    return [
        Job(EQUAL, local={"every": 24, "outer": (1.0, 0.0)}, **given),
        Job(UNEVEN, local={"every": 24, "outer": (1.0, 0.0), "uneven": True}, **given),
    ]


LEVEL, WAITING, QUORUM = "no stalls", "stalls, all wait", "stalls, quorum of 3"


def jobs_of_stalls() -> list[Job]:
    """Sites of which the last one stalls: the others wait for it, or do not. Without stalls a quorum costs nothing."""
    given: dict[str, Any] = {"is_free": True, "steps": 960, "warm_up": 60}
    usual: dict[str, Any] = {"every": 24}
    return [
        Job(LEVEL, local={**usual, "quorum": 3}, **given),
        Job(WAITING, local=usual, stall_s=2.0, **given),
        Job(QUORUM, local={**usual, "quorum": 3}, stall_s=2.0, **given),
    ]


def jobs_of_exact() -> list[Job]:
    """Pairs with the same codec: the hook, and `every="auto"` where it stays exact."""
    jobs = []
    for title, codec in (("float32", "none"), ("bf16", "bf16")):
        common: dict[str, Any] = {"policy": {"codec": codec}, "steps": 24}
        jobs.append(Job(f"hook, {title}", warm_up=4, **common))
        jobs.append(Job(f"{LOCAL_AUTO}, {title}", local={"every": "auto"}, warm_up=8, **common))
    return jobs


def jobs_of_torchft() -> list[Job]:
    """Local steps beside those of torchft on gloo, with the same H."""
    kinds = [(h, kind) for h in PERIODS for kind in (DILOCO, LOCAL_SGD)]
    return [
        Job(ALONE, is_alone=True),
        *(Job(name_of(h), local={"every": h, "fragments": 4}, warm_up=1, steps=24) for h in PERIODS),
        *(
            Job(f"torchft, {kind}, H {h}", "gloo", "cubic", period=h, torchft=kind, warm_up=1, steps=2 * h)
            for h, kind in kinds
        ),
    ]


TRAINED_AT = ("20", "100")
TRAINED: dict[str, Any] = {"width": 48, "layers": 2, "heads": 4, "context": 32, "batch": 4, "learning_rate": 1e-2}
TRAINED |= {"validate_every": 250, "validation_batch": 512}
TRAINED_STEPS, LOCAL_STEPS = 1500, 2000
TRAINING = "Training, "


def trainings() -> list[training.Job]:
    """The systems that train end to end."""
    state = {"codec": "auto", "allow_state": True, "exact_steps": 8}
    exact: dict[str, Any] = {**TRAINED, "steps": TRAINED_STEPS}
    return [
        training.Job("gloo, cubic bf16", "gloo", "cubic", "bf16", **exact),  # the best by the table of steps at 20
        training.Job(AUTO, policy={"codec": "auto"}, **exact),
        training.Job(STATE, policy=state, **exact),
        *(
            training.Job(name_of(h), local={"every": h, "exact_steps": 100}, steps=LOCAL_STEPS, **TRAINED)
            for h in (8, 16)
        ),
    ]


def measure_training(rate: str) -> dict[str, Any]:
    """The trainings at a rate. Raises BenchError if one failed."""
    scenario = Scenario(HOSTS, (Link(rate_bps=int(rate) * 1e6),), tcp_congestion_control=("cubic", "bbr"))
    about = machine.facts()
    runs = training.measure_all(scenario, trainings(), turns.LOGS, name=f"local_training.{rate}")
    kept = [{**log, "step_s": [], "cpu_s": [], "sent_bytes": sum(log["sent_bytes"])} for log in runs]
    return {"network": scenario.table, "runs": kept, "machine": about, "measured": today()}


def _trained(name: str, network: Mapping[str, Any]) -> list[str]:
    runs = network["runs"]
    gloo = min((log for log in runs if log["job"]["backend"] == "gloo"), key=lambda log: log["validations"][-1][1])
    state = next(log for log in runs if log["job"]["system"] == STATE)
    columns = ["system", "steps", "exact first", "seconds", "MB sent", "final loss", "difference to gloo's"]
    columns += ["best gloo / this, seconds", "with state / this"]
    rows = []
    for log in runs:
        steps, seconds, loss = log["validations"][-1]
        cells = [
            log["job"]["system"],
            str(steps),
            str((log["job"]["local"] or {}).get("exact_steps", "")),
            f"{seconds:.1f}",
            f"{log['sent_bytes'] / 1e6:.1f}",
            f"{loss:.4f}",
            f"{loss - gloo['validations'][-1][2]:+.4f}",
            *(f"{other['validations'][-1][1] / seconds:.2f}" for other in (gloo, state)),
        ]
        rows.append(cells)
    conditions = (
        f"{Scenario.from_table(network['network'])}. {runs[0]['parameters']:,} parameters; one seed. Ratios of seconds "
        f"are times to a loss only where the difference is 0 or below. {measured_on(network)}"
    )
    return _page(name, columns, rows, conditions)


def name_of(every: int) -> str:
    return f"local, H {every}"


def measure_case(case: str, rounds: int, *, short: bool = False) -> dict[str, Any]:
    """The results of a case by the name of its network. Raises BenchError if a rank failed."""
    found = {}
    is_of_two = case == SITES_OF_TWO
    special = {
        SPEEDS: (jobs_of_speeds, ", one of half the speed"),
        STALLS: (jobs_of_stalls, ", one that stalls"),
        EXACT: (jobs_of_exact, ", where auto stays exact"),
        TORCHFT: (jobs_of_torchft, ", beside torchft"),
    }
    make, suffix = (jobs_of_two, "") if is_of_two else special.get(case, (jobs_of, ""))
    rates = {SITES_OF_TWO: SITES_OF_TWO_RATES, EXACT: (EXACT_RATE,)}
    for rate in rates.get(case, (RATES_MBIT_S[0] if case in special else int(case),)):
        link = Link(rate_bps=rate * 1e6, loss=0.01 * is_of_two, delay_ms=50.0 * is_of_two)
        hosts, per_host = (8, 2) if is_of_two else (HOSTS, 1)
        algorithms = ("cubic", "bbr")
        scenario = Scenario(hosts, (link,), ranks_per_host=per_host, tcp_congestion_control=algorithms)
        jobs = make()
        if short:
            jobs = [dataclasses.replace(job, steps=2) for job in jobs]
        about = machine.facts()
        request = {"jobs": [dataclasses.asdict(job) for job in in_turns(jobs, rounds)]}
        name = f"{hosts} x {per_host}, {rate} Mbit/s{suffix}"
        runs = turns.measure(scenario, MODULE, request, f"local_steps.{case}.{rate}")
        order = {job.system: i for i, job in enumerate(jobs)}
        runs.sort(key=lambda log: order[log["job"]["system"]])
        found[name] = {"network": scenario.table, "runs": runs, "machine": about, "measured": today()}
    return found


def mean_s(logs: Sequence[Log]) -> list[float]:
    """The mean step of each round."""
    return [statistics.fmean(log["step_s"]) for log in logs]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below this share of them."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def best_gloo(steps: Mapping[str, Sequence[float]]) -> str:
    """The gloo that averages gradients in the shortest steps, in 16 bits or in float32."""
    return min((name for name in steps if name.startswith("gloo")), key=lambda name: statistics.median(steps[name]))


def _ratio(theirs: Sequence[float], ours: Sequence[float], factor: float = 1.0) -> str:
    """The median ratio of the rounds."""
    return f"{statistics.median(a / (b * factor) for a, b in zip(theirs, ours, strict=True)):.2f}"


def factor_of(losses: Mapping[str, Any], every: int) -> float | None:
    """The measured factor of steps of `LocalSteps(every=...)`, with the fragments, delay and codec that it chooses, at
    the learning rate that suits it best."""
    usual = local_loss.System(every, *local_loss.usual(every), "int4-int8", local_loss.STARTS[1])
    systems = {usual._replace(rate=rate) for rate in local_loss.RATES}
    rows = local_loss.rows_of(losses, "byte GPT", "AdamW")
    factors = [row.factor for row in rows if row.system in systems and row.factor is not None]
    return min(factors, default=None)


def _factor(log: Log, losses: Mapping[str, Any]) -> float | None:
    """The factor of steps of a run with local steps, as far as it was measured."""
    if not log["job"]["local"]:
        return None
    return 1.0 if "all stay exact" in log["words"] else factor_of(losses, log["every"])


def _network(name: str, network: Mapping[str, Any], losses: Mapping[str, Any]) -> list[str]:
    runs = by_system(network["runs"])
    steps = {system: mean_s(logs) for system, logs in runs.items()}
    gloo = best_gloo(steps) if AUTO in steps else None
    columns = ["system", "mean step (ms)", "range", "median", "p99", "MB sent per step", "share of computation"]
    columns += ["best gloo / this", "hook, auto / this", "with state / this", "factor of steps"]
    columns += ["time to a loss: best gloo / this", "with state / this", "busy CPU"]
    rows = []
    for system, values in steps.items():
        all_s = [seconds for log in runs[system] for seconds in log["step_s"]]
        cells = [
            system + f" (H {runs[system][0]['every']})" * (system in (LOCAL_AUTO, LOCAL_CODEC)),
            f"{statistics.median(values) * 1e3:.1f}",
            f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}",
            f"{statistics.median(all_s) * 1e3:.1f}",
            f"{percentile(all_s, 0.99) * 1e3:.1f}",
            f"{statistics.median(log['sent_bytes'] for log in runs[system]) / 1e6:.3f}",
            f"{statistics.median(steps[ALONE]) / statistics.median(values):.1%}",
        ]
        if gloo is None:
            cells += [""] * 6
        else:
            cells += [_ratio(steps[other], values) for other in (gloo, AUTO, STATE)]
            factor = _factor(runs[system][0], losses)
            cells += ["", "", ""] if factor is None else [
                f"{factor:.2f}", *(_ratio(steps[other], values, factor) for other in (gloo, STATE))
            ]  # fmt: skip
        rows.append([*cells, turns.busy_cell(runs[system])])
    sleep_s = network["runs"][0]["job"]["step_s"]
    words = runs[LOCAL_AUTO][0]["words"].splitlines()[0]
    best = f" The best gloo is `{gloo}`." if gloo else ""
    conditions = (
        f"{Scenario.from_table(network['network'])}. {sleep_s * 1e3:.0f} ms of a step are a sleep. "
        f"{len(steps[ALONE])} rounds in turns.{best} `explain()` of `auto`: `{words}`. {measured_on(network)}"
    )
    return _page(name, columns, rows, conditions)


def _page(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], conditions: str) -> list[str]:
    return [f"### {name}", markdown(columns, rows), conditions]


def _speeds(name: str, network: Mapping[str, Any]) -> list[str]:
    runs = by_system(network["runs"])
    rates = {system: [1 / log["step_s"][0] for log in logs] for system, logs in runs.items()}
    columns = [
        "system",
        "steps of all sites per second",
        "range",
        "times as many",
        "of them by a fast site",
        "busy CPU",
    ]
    rows = [
        [
            system,
            f"{statistics.median(values):.1f}",
            f"{min(values):.1f} to {max(values):.1f}",
            _ratio(values, rates[EQUAL], 1.0),
            f"{statistics.median(log['own'] for log in runs[system]):.1%}",
            turns.busy_cell(runs[system]),
        ]
        for system, values in rates.items()
    ]
    job = network["runs"][0]["job"]
    conditions = (
        f"{Scenario.from_table(network['network'])}. A step is a sleep of {job['step_s'] * 1e3:.0f} ms, and of "
        f"{job['step_s'] / min(job['speeds']) * 1e3:.0f} ms on the slow site; H is {job['local']['every']}. "
        f"The limit is {sum(job['speeds']) / len(job['speeds']) / min(job['speeds']):.2f}. {measured_on(network)}"
    )
    return _page(name, columns, rows, conditions)


def _stalls(name: str, network: Mapping[str, Any]) -> list[str]:
    runs = by_system(network["runs"])
    own_s = {system: [log["step_s"][0] / log["own"] for log in logs] for system, logs in runs.items()}
    columns = ["system", "mean step of a site without stalls (ms)", "range", "share of computation"]
    columns += ["steps of all sites per second", "of them by that site", "busy CPU"]
    rows = [
        [
            system,
            f"{statistics.median(values) * 1e3:.1f}",
            f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}",
            f"{statistics.median(own_s[LEVEL]) / statistics.median(values):.1%}",
            f"{statistics.median(1 / log['step_s'][0] for log in runs[system]):.1f}",
            f"{statistics.median(log['own'] for log in runs[system]):.1%}",
            turns.busy_cell(runs[system]),
        ]
        for system, values in own_s.items()
    ]
    job = runs[QUORUM][0]["job"]
    conditions = (
        f"{Scenario.from_table(network['network'])}. A step is a sleep of {job['step_s'] * 1e3:.0f} ms; every "
        f"{STALL_EVERY} of its steps, one site sleeps for {job['stall_s']:g} s more. H is {job['local']['every']}. The "
        f"share of computation is that of `{LEVEL}` divided by this. {measured_on(network)}"
    )
    return _page(name, columns, rows, conditions)


def _exact(name: str, network: Mapping[str, Any]) -> list[str]:
    runs = by_system(network["runs"])
    steps = {system: mean_s(logs) for system, logs in runs.items()}
    columns = [
        "system",
        "mean step (ms)",
        "range",
        "median",
        "MB sent per step",
        "this / the hook",
        "range",
        "busy CPU",
    ]
    rows = []
    for system, values in steps.items():
        of_hook = [own / hook for own, hook in zip(values, steps[system.replace(LOCAL_AUTO, HOOK)], strict=True)]
        is_local = LOCAL_AUTO in system
        rows.append(
            [
                system,
                f"{statistics.median(values) * 1e3:.1f}",
                f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}",
                f"{statistics.median(s for log in runs[system] for s in log['step_s']) * 1e3:.1f}",
                f"{statistics.median(log['sent_bytes'] for log in runs[system]) / 1e6:.3f}",
                f"{statistics.median(of_hook):.3f}" if is_local else "",
                f"{min(of_hook):.3f} to {max(of_hook):.3f}" if is_local else "",
                turns.busy_cell(runs[system]),
            ]
        )
    job = network["runs"][0]["job"]
    conditions = (
        f"{Scenario.from_table(network['network'])}. {job['step_s'] * 1e3:.0f} ms of a step are a sleep. "
        f"{len(next(iter(steps.values())))} rounds in turns. {measured_on(network)}"
    )
    return _page(name, columns, rows, conditions)


def _torchft(name: str, network: Mapping[str, Any]) -> list[str]:
    runs = by_system(network["runs"])
    steps = {system: mean_s(logs) for system, logs in runs.items()}
    columns = ["system", "mean step (ms)", "range", "MB sent per step", "share of computation", "this / local"]
    columns += ["busy CPU"]
    rows = [
        [
            system,
            f"{statistics.median(values) * 1e3:.1f}",
            f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}",
            f"{statistics.median(log['sent_bytes'] for log in runs[system]) / 1e6:.3f}",
            f"{statistics.median(steps[ALONE]) / statistics.median(values):.1%}",
            _ratio(values, steps[local]) if (local := name_of(runs[system][0]["every"])) in steps else "",
            turns.busy_cell(runs[system]),
        ]
        for system, values in steps.items()
    ]
    sleep_s = network["runs"][0]["job"]["step_s"]
    conditions = (
        f"{Scenario.from_table(network['network'])}. {sleep_s * 1e3:.0f} ms of a step are a sleep. "
        f"{len(steps[ALONE])} rounds in turns. {measured_on(network)}"
    )
    return _page(name, columns, rows, conditions)


def table(content: Mapping[str, Any], losses: Mapping[str, Any]) -> str:
    """The tables of the page, as Markdown: only from the results."""
    parts = []
    for name, network in content.items():
        if name.startswith(TRAINING):
            parts += _trained(name, network)
        elif network["runs"][0]["job"].get("speeds"):
            parts += _speeds(name, network)
        elif network["runs"][0]["job"].get("is_free"):
            parts += _stalls(name, network)
        elif network["runs"][0]["job"]["system"] == jobs_of_exact()[0].system:
            parts += _exact(name, network)
        elif any(log["job"].get("torchft") for log in network["runs"]):
            parts += _torchft(name, network)
        else:
            parts += _network(name, network, losses)
    return "\n\n".join(parts) or "Nothing was measured."


def tables_of(content: Content) -> dict[str, str]:
    """The part of the page, with the factors of steps that another benchmark measured."""
    return {"steps": table(content, read_results(local_loss.RESULTS, {}))}


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
