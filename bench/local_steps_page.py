"""The tables of bench.local_steps in docs/local_bench.md: only from the kept results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench import fidelity, local_loss
from bench.harness import turns
from bench.harness.page import markdown, measured_on
from bench.harness.turns import Log, by_system
from bench.jobs.local_steps import STALL_EVERY
from bench.local_systems import (
    ALONE,
    AUTO,
    EQUAL,
    EXACT,
    HOOK,
    LEVEL,
    LOCAL_AUTO,
    LOCAL_CODEC,
    QUORUM,
    SPECIAL,
    SPEEDS,
    STALLS,
    STATE,
    TORCHFT,
    TRAINING,
    name_of,
)
from commlayer.tools.emulate.scenario import Scenario


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
    scenario = Scenario.from_table(network["network"])
    if scenario.hosts != fidelity.RANKS:
        losses = {}  # measured with so many sites
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
        f"{scenario}. {sleep_s * 1e3:.0f} ms of a step are a sleep. "
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
        ratios = ["", ""]
        if LOCAL_AUTO in system:
            hook = steps[system.replace(LOCAL_AUTO, HOOK)]
            of_hook = [own / its for own, its in zip(values, hook, strict=True)]
            ratios = [f"{statistics.median(of_hook):.3f}", f"{min(of_hook):.3f} to {max(of_hook):.3f}"]
        rows.append(
            [
                system,
                f"{statistics.median(values) * 1e3:.1f}",
                f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}",
                f"{statistics.median(s for log in runs[system] for s in log['step_s']) * 1e3:.1f}",
                f"{statistics.median(log['sent_bytes'] for log in runs[system]) / 1e6:.3f}",
                *ratios,
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


_TABLES = {SPEEDS: _speeds, STALLS: _stalls, EXACT: _exact, TORCHFT: _torchft}


def tables(content: Mapping[str, Any], losses: Mapping[str, Any]) -> str:
    """The tables of the page, as Markdown: only from the results."""
    parts = []
    for name, network in content.items():
        case = next((case for case, end in SPECIAL.items() if name.endswith(end)), None)
        if name.startswith(TRAINING):
            parts += _trained(name, network)
        elif case is not None:
            parts += _TABLES[case](name, network)
        else:
            parts += _network(name, network, losses)
    return "\n\n".join(parts) or "Nothing was measured."
