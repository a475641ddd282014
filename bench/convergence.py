"""The effect of bounded loss on training: loss bounds x treatments x seeds against exact training with the same seeds.

    python -m bench.convergence                everything (about 20 minutes; the links need root)
    python -m bench.convergence --only 0.03    one loss bound, merged into the kept results
    python -m bench.convergence --quick        one seed and few steps, to see that it works; keeps nothing
    python -m bench.convergence --table        only the plot and the table of the kept results

The links lose more packets than the loss bound allows, so that training uses all of it. Runs with the same seed have
the same initialisation and the same data in the same order. Exact training is reliable mode on the same lossy links.
The results do not depend on speed. Writes bench/results/convergence.json, docs/convergence.png and the table of
docs/convergence.md.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.driver import BenchError, Benchmark, Content
from bench.harness.options import options
from bench.harness.page import markdown, measured_on
from bench.harness.picture import picture
from bench.harness.results import today
from bench.jobs import training
from bench.jobs.training import ROOT, Job, Log
from commlayer.tools.bench import machine
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/convergence.json"
PAGE = ROOT / "docs/convergence.md"
PLOT = ROOT / "docs/convergence.png"
LOGS = ROOT / "out/convergence"

EXACT, AGAIN = "exact", "exact again"
TREATMENTS = ("feedback", "rescale", "zero")
LOSS = {0.001: 0.003, 0.01: 0.02, 0.03: 0.05, 0.1: 0.13}
"""Loss of the links at each loss bound."""
EXACT_AT = {EXACT: 0.001, AGAIN: 0.1}
"""Exact training runs at the least and at the most loss. The second run shows the effect of chance (sums are made in
the order of arrival), and that reliable mode is exact."""
TARGET = (0.03, "feedback")
"""The condition that should not be distinguishable from exact training."""
SEEDS = (1, 2, 3)
MODEL: dict[str, Any] = {
    "width": 96,  # packets are short: messages are just long enough to lose 0.1 % of them
    "layers": 5,
    "steps": 120,
    "validate_every": 12,
    "validation_batch": 128,
    "bucket_mb": 25.0,
}
MTU = 576

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
T95 |= {12: 2.179, 15: 2.131, 20: 2.086, 24: 2.064, 26: 2.056, 30: 2.042, 40: 2.021, 60: 2.0, 120: 1.98}


def t95(degrees: int) -> float:
    """The quantile. Between two rows of the table: that of fewer degrees of freedom, which is larger."""
    return T95[max(known for known in T95 if known <= degrees)]


@dataclass(frozen=True)
class Comparison:
    """One condition against exact training, paired by seed. Losses are nats per byte, on held-out text."""

    loss_bound: float
    """0 for the second run of exact training."""
    treatment: str
    losses: tuple[float, ...]
    """Final losses, by seed."""
    differences: tuple[float, ...]
    """Differences to exact training with the same seed."""
    uncounted_share: float
    """Share of the sent contributions missing from the sums, mean over the seeds."""
    half_width: float
    """Half the width of the 95 % interval of the mean difference."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def distinguishable(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.mean) > self.half_width


def final_losses(logs: list[Log]) -> dict[tuple[float, str], dict[int, Log]]:
    """The logs by condition and seed."""
    by_condition: dict[tuple[float, str], dict[int, Log]] = {}
    for log in logs:
        job = log["job"]
        loss_bound = (job["policy"] or {}).get("loss_bound", 0.0)
        by_condition.setdefault((loss_bound, job["system"]), {})[job["seed"]] = log
    return by_condition


def pooled_deviation(differences: list[list[float]]) -> tuple[float, int]:
    """Standard deviation of the differences about the mean of their condition, and its degrees of freedom.

    It is pooled over the treatments of one loss bound, because three seeds are few, but not over loss bounds, because
    runs with more loss differ more. The interval is narrower than each condition's own, so it finds more differences.
    """
    degrees = sum(len(difference) - 1 for difference in differences)
    squares = sum(
        sum((value - statistics.fmean(difference)) ** 2 for value in difference) for difference in differences
    )
    return (squares / degrees) ** 0.5, degrees


def compare(content: dict[str, Any]) -> list[Comparison]:
    """Every condition that has all seeds of exact training, by loss bound."""
    by_condition = final_losses(content["logs"])
    exact = {seed: log["validations"][-1][2] for seed, log in by_condition.get((0.0, EXACT), {}).items()}
    losses = {
        condition: [runs[seed]["validations"][-1][2] for seed in exact]
        for condition, runs in sorted(by_condition.items())
        if condition != (0.0, EXACT) and exact.keys() <= runs.keys()
    }
    differences = {
        condition: [value - exact[seed] for seed, value in zip(exact, values, strict=True)]
        for condition, values in losses.items()
    }
    if len(exact) < 2:
        return []
    half_widths = {}
    for loss_bound in {loss_bound for loss_bound, _ in differences}:
        deviation, degrees = pooled_deviation(
            [difference for (at, _), difference in differences.items() if at == loss_bound]
        )
        half_widths[loss_bound] = t95(degrees) * deviation / len(exact) ** 0.5
    return [
        Comparison(
            loss_bound,
            treatment,
            tuple(losses[loss_bound, treatment]),
            tuple(differences[loss_bound, treatment]),
            statistics.fmean(by_condition[loss_bound, treatment][seed]["uncounted_share"] for seed in exact),
            half_widths[loss_bound],
        )
        for loss_bound, treatment in losses
    ]


def table(content: dict[str, Any]) -> str:
    """The page's table and sentences in Markdown, from the results alone."""
    comparisons = compare(content)
    exact = [log for log in content["logs"] if log["job"]["system"] == EXACT]
    if not comparisons:
        return "Nothing has been measured yet: `python -m bench.convergence`."
    seeds = sorted(log["job"]["seed"] for log in exact)
    final = [log["validations"][-1][2] for seed in seeds for log in exact if log["job"]["seed"] == seed]
    spread = statistics.stdev(final)
    columns = ["loss bound", "treatment", "not counted", f"final loss, seeds {', '.join(map(str, seeds))}"]
    columns += ["mean difference to exact", "95 % interval", "distinguishable from exact"]
    rows = [["-", EXACT, "0", _losses(final), "", "", ""]]
    for comparison in comparisons:
        interval = f"{comparison.mean - comparison.half_width:+.4f} to {comparison.mean + comparison.half_width:+.4f}"
        bound = f"{comparison.loss_bound:.1%}" if comparison.loss_bound else "-"
        cells = [bound, comparison.treatment, f"{comparison.uncounted_share:.3%}", _losses(comparison.losses)]
        cells += [f"{comparison.mean:+.4f}", interval, "yes" if comparison.distinguishable else "no"]
        rows.append(cells)
    return "\n".join([markdown(columns, rows), "", *_sentences(content, comparisons, spread)])


def _losses(values: Any) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _sentences(content: dict[str, Any], comparisons: list[Comparison], spread: float) -> list[str]:
    lines = []
    lines.append(
        f"Seed to seed, exact training's final loss has a standard deviation of {spread:.4f}. Differences are paired "
        f"by seed; the interval is Student's, of the mean difference, with the deviation pooled over the treatments of "
        f"a loss bound: a smaller difference would have gone unnoticed. There is no correction for "
        f"{len(comparisons)} comparisons at once: one in twenty would be called distinguishable by chance."
    )
    for comparison in comparisons:
        if (comparison.loss_bound, comparison.treatment) == TARGET:
            reached = "**no**: it is" if comparison.distinguishable else "yes"
            lines.append(
                f"Target: `feedback` at 3 % not distinguishable from exact: {reached} ({comparison.mean:+.4f} "
                f"± {comparison.half_width:.4f}, with {comparison.uncounted_share:.2%} of the contributions not "
                "counted)."
            )
    identical = all(log["replicas_identical"] for log in content["logs"])
    lines.append(f"Replicas were bit-identical in {'every run' if identical else '**not every** run'}.")
    log = content["logs"][0]
    links = ", ".join(f"{loss:.1%} at {loss_bound:.1%}" for loss_bound, loss in LOSS.items())
    tokens = log["ranks"] * log["job"]["batch"] * log["job"]["context"]
    lines.append(
        f"{log['ranks']} ranks on emulated hosts, {log['parameters']:,} parameters in 32 bits, "
        f"{log['job']['steps']} steps of AdamW at {tokens} bytes of text per step. The links lose more than the loss "
        f'bound, each packet independently: {links}. "Not counted" is a share of the contributions that ranks sent to '
        "owners, which are three quarters of all."
    )
    lines.append(measured_on(content, "convergence"))
    return [part for line in lines for part in (line, "")][:-1]


def plot(content: dict[str, Any], path: Path) -> None:
    """Differences to exact training by loss bound and treatment, a dot per seed, and loss over steps."""
    colours = dict(zip((EXACT, *TREATMENTS), ("black", "tab:blue", "tab:green", "tab:red"), strict=True))
    with picture(path, 1, 2, (11, 4.5)) as axes:
        _draw_curves(axes[0, 0], content["logs"], colours)
        _draw_ends(axes[0, 1], compare(content), colours)


def _draw_curves(curves: Any, logs: list[Log], colours: Mapping[str, str]) -> None:
    for (loss_bound, treatment), runs in final_losses(logs).items():
        if loss_bound not in (0.0, 0.03) or treatment == AGAIN:
            continue
        for number, log in enumerate(runs.values()):
            steps, _, by_step = zip(*log["validations"], strict=True)
            style = "-" if treatment == EXACT else "--"
            name = treatment if loss_bound == 0 else f"{treatment} at {loss_bound:.0%}"
            curves.plot(steps, by_step, style, color=colours[treatment], lw=1, label=None if number else name)
    curves.set(xlabel="step", ylabel="loss on held-out text (nats per byte)", title="three seeds each")
    curves.legend()


def _draw_ends(ends: Any, comparisons: Sequence[Comparison], colours: Mapping[str, str]) -> None:
    loss_bounds = sorted({comparison.loss_bound for comparison in comparisons} - {0.0})
    again = [comparison for comparison in comparisons if comparison.loss_bound == 0]
    for comparison in comparisons:
        place = 0.0 if comparison.loss_bound == 0 else 1 + loss_bounds.index(comparison.loss_bound)
        shift = 0.0 if comparison.loss_bound == 0 else 0.2 * (TREATMENTS.index(comparison.treatment) - 1)
        colour = colours[EXACT if comparison.loss_bound == 0 else comparison.treatment]
        label = comparison.treatment if comparison.loss_bound in (0.0, loss_bounds[0] if loss_bounds else 0.0) else None
        ends.errorbar(
            place + shift, comparison.mean, comparison.half_width, fmt="_", color=colour, capsize=3, label=label
        )
        ends.plot([place + shift] * len(comparison.differences), comparison.differences, ".", color=colour, alpha=0.6)
    ends.axhline(0, color="black", lw=0.5)
    ends.set_xticks(
        range(len(loss_bounds) + 1), [AGAIN if again else "", *(f"{loss_bound:.1%}" for loss_bound in loss_bounds)]
    )
    ends.set(xlabel="loss bound", ylabel="difference to exact, same seed", title="final loss; bars are 95 % intervals")
    ends.legend()


def jobs(loss_bound: float, seeds: tuple[int, ...], model: dict[str, Any]) -> list[Job]:
    """The jobs on the links of one loss bound, seed by seed: an interrupted run has whole seeds."""
    policies: dict[str, dict[str, Any]] = {name: {} for name, at in EXACT_AT.items() if at == loss_bound}
    policies |= {treatment: {"loss_bound": loss_bound, "treatment": treatment} for treatment in TREATMENTS}
    return [Job(name, policy=policy, seed=seed, **model) for seed in seeds for name, policy in policies.items()]


def is_reached(content: Content) -> bool:
    """Whether the target is reached, as far as it was measured."""
    return not any(pair.distinguishable for pair in compare(content) if (pair.loss_bound, pair.treatment) == TARGET)


BENCHMARK = Benchmark(
    RESULTS,
    PAGE,
    lambda content: {"results": table(content)},
    {"schema": 1, "logs": []},
    lambda content: plot(content, PLOT),
    is_reached,
)


def main() -> int:
    """0 if the target is reached, 1 if not, 2 if a run failed."""
    asked = options(__doc__, only=LOSS, quick="one seed, few steps", table=True).parse_args()
    seeds, model = ((1,), MODEL | {"steps": 12}) if asked.quick else (SEEDS, MODEL)
    about = machine.facts()

    def measure(content: Content, loss_bound: float) -> None:
        scenario = Scenario(hosts=4, nics=(Link(loss=LOSS[loss_bound], mtu=MTU),))
        todo = jobs(loss_bound, seeds, model)
        start = time.monotonic()
        logs = training.measure(scenario, todo, LOGS, name=f"{loss_bound:g}")
        ended = f"loss bound {loss_bound:g}: {len(logs)} of {len(todo)} runs"
        print(f"{ended} in {time.monotonic() - start:.0f} s", flush=True)
        done = {(log["job"]["system"], log["job"]["seed"]) for log in logs}
        kept = [
            log
            for log in content["logs"]
            if log["loss_bound"] != loss_bound or (log["job"]["system"], log["job"]["seed"]) not in done
        ]
        content["logs"] = kept + [log | {"loss_bound": loss_bound, "link_loss": LOSS[loss_bound]} for log in logs]
        content |= {"machine": about, "measured": today()}
        if len(logs) < len(todo):
            raise BenchError(f"{ended} ended")

    return BENCHMARK.main(asked, asked.only or LOSS, measure)


if __name__ == "__main__":
    sys.exit(main())
