"""Does `commlayer headroom` tell the truth? Its prediction beside the fastest of several settings. Needs root.

    python -m bench.headroom                    five networks and a job with little to win (about 9 minutes)
    python -m bench.headroom --only clean50     one of them
    python -m bench.headroom --quick            fewer steps and settings; keeps nothing
    python -m bench.headroom --table            only the table of the kept results

The job (`bench/jobs/headroom.py`) is DDP on gloo, whose accelerator is a sleep. Headroom predicts the share of a step
that no communication would win. Then the job runs with each setting, and the fastest one shows what could be won.
Writes bench/results/headroom.json and the table of docs/headroom.md.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.driver import Benchmark, Content
from bench.harness.options import options
from commlayer.tools.bench import machine
from commlayer.tools.headroom.command import Options, measure
from commlayer.tools.job.trial import run_trial

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/headroom.md"
RESULTS = ROOT / "bench/results/headroom.json"

SETTINGS = ("commlayer", "int4", "topk:0.001", "overlap", "overlap+int4")
STEPS, WARMUP = 8, 3
NEAR, LITTLE = 0.10, 0.05
"""Largest difference of prediction and best setting, as a share of the step; the same where little can be won."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A network and a job."""

    title: str
    scenario: str
    width: int = 256
    forward_ms: float = 10.0

    def command(self, setting: str) -> list[str]:
        """The job's start."""
        job = ["-m", "bench.jobs.headroom", "--setting", setting, "--width", str(self.width)]
        job += ["--forward-ms", str(self.forward_ms)]
        return [sys.executable, "-m", "commlayer", "emulate", self.scenario, "--", sys.executable, *job]


CASES = {
    "fast": Case("clean, fast for the job", "clean200", width=32, forward_ms=20.0),
    "clean200": Case("clean, 200 Mbit/s", "clean200"),
    "clean50": Case("clean, slow (50 Mbit/s)", "clean50", forward_ms=20.0),
    "loss1": Case("1 % loss", "loss1"),
    "two_nics": Case("two unequal NICs", "two_nics_150_50"),
    "incast": Case("incast and cross traffic", "incast_cross"),
}


def run(case: Case, settings: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a case."""
    report = measure(Options(case.command("plain"), **options), say)
    found = report.split
    medians_s = {}
    for setting in settings:
        trial = run_trial(case.command(setting), environment={}, steps=STEPS, warmup=WARMUP, timeout_s=180)
        medians_s[setting] = trial.median_s
        say(f"{setting}: {trial.median_s * 1e3:.0f} ms")
    best = min(medians_s, key=lambda name: medians_s[name])
    got = max(0.0, 1 - medians_s[best] / found.as_is.median_s)
    figures = {
        name: value for name, value in report.table.items() if name not in ("command", "next_command")
    }  # no paths
    row = {**figures, "case": case.title, "settings_s": medians_s, "best": best, "got": got}
    say(f"{case.title}: predicted {found.share:.0%}, best setting {best} wins {got:.0%}; {report.verdict}")
    return row


def is_near(row: Mapping[str, Any]) -> bool:
    """Whether the prediction is as near as it must be."""
    allowed = LITTLE if row["share"] < LITTLE else NEAR
    return bool(abs(row["share"] - row["got"]) <= allowed)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| network | step | left out | predicted gain (95 %) | best setting | its step | its gain | near |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        steps, (low, high) = row["steps"], row["share_interval"]
        lines.append(
            f"| {row['case']} | {steps['as_is']['median_s'] * 1e3:.0f} ms | "
            f"{steps['left_out']['median_s'] * 1e3:.0f} ms | {row['share']:.0%} ({low:.0%} to {high:.0%}) | "
            f"`{row['best']}` | {row['settings_s'][row['best']] * 1e3:.0f} ms | {row['got']:.0%} | "
            f"{'yes' if is_near(row) else '**no**'} |"
        )
    return "\n".join(lines)


def tables(kept: Mapping[str, Any]) -> dict[str, str]:
    """The table of the page."""
    names = ", ".join(f"`{name}`" for name in kept["settings"])
    off = statistics.fmean(abs(row["share"] - row["got"]) for row in kept["rows"])
    about = (
        f"Four ranks; settings: {names}. The mean difference of prediction and best setting is {off:.1%} of a step. "
        f"{kept['machine']['cpu']}, {kept['machine']['cores']} cores."
    )
    return {"measured": f"{table(kept['rows'])}\n\n{about}"}


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


BENCHMARK = Benchmark(RESULTS, PAGE, tables, is_good=lambda kept: all(map(is_near, kept["rows"])))


def main() -> int:
    """Exit status: 1 if a prediction is not near."""
    asked = options(__doc__, only=CASES, quick="fewer steps and settings", table=True).parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    settings = SETTINGS[-2:] if asked.quick else SETTINGS
    settled = {"steps": 2 if asked.quick else 3, "rounds": 2, "warmup": WARMUP}

    def measure(kept: Content, name: str) -> None:
        row = run(CASES[name], settings, settled)
        rows = {other["case"]: other for other in (*kept.get("rows", ()), row)}
        ordered = [rows[case.title] for case in CASES.values() if case.title in rows]
        kept |= {"machine": machine.facts(), "settings": settings, "rows": ordered}

    return BENCHMARK.main(asked, asked.only or CASES, measure)


if __name__ == "__main__":
    sys.exit(main())
