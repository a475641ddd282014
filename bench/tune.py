"""Does `commlayer tune` find the best settings? Its choice beside an exhaustive search of the same space. Needs root.

    python -m bench.tune                    five networks (about 30 minutes each)
    python -m bench.tune --only clean50     one of them; its row replaces the kept one
    python -m bench.tune --quick            five settings and few steps; keeps nothing (about 3 minutes per network)
    python -m bench.tune --table            only the table of the kept results

The job is that of `bench/headroom.py`, on four emulated hosts, without a bucket size of its own. `tune` may compress
and lose. Then every arm of the space makes as many steps as one in the last rung of `tune`. The best arm, the chosen
one and the default make them twice more, in turns, because the best of many noisy measurements looks too good.
Writes bench/results/tune.json and the table of docs/tune.md.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.driver import Benchmark, Content
from bench.harness.options import options
from bench.headroom import CASES, Case, say
from commlayer.tools.bench import machine
from commlayer.tools.job.trial import TrialError
from commlayer.tools.tune.arm import Arm
from commlayer.tools.tune.command import Options, Report, run, trial
from commlayer.tools.tune.space import Space

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/tune.md"
RESULTS = ROOT / "bench/results/tune.json"

NAMES = ("clean200", "clean50", "loss1", "two_nics", "incast")
ALLOWED = ("lossy", "compressed")
TRIALS, STEPS = 4, 9
TURNS = 2
NEAR, PART = 0.05, 0.1
"""How much longer than the best the chosen step may be, and the share of the exhaustive search's time to need."""


def narrowed(space: Space, *, short: bool) -> Space:
    """The part of the space that is searched: one loss bound; in a short run, few values of each setting."""
    space = dataclasses.replace(space, loss_bounds=(0.0, 0.05))
    if short:
        space = dataclasses.replace(
            space, codecs=("none", "int8"), loss_bounds=(0.0,), buckets_mb=(0.0,), ports=space.ports[:1]
        )
    return space


def command_of(case: Case) -> list[str]:
    """The job's start: as in `bench/headroom.py`, with DDP's own bucket size."""
    return [*case.command("plain"), "--bucket-mb", "0"]


def tuned(options: Options, *, short: bool) -> tuple[Report, float]:
    """The report, and its seconds."""
    begin_s = time.monotonic()
    return run(options, say, narrowed=lambda space: narrowed(space, short=short)), time.monotonic() - begin_s


def median_s(options: Options, arm: Arm) -> float:
    """The step of an arm; endless for one that fails."""
    try:
        return trial(options, arm, options.steps).median_s
    except TrialError as error:
        say(f"{arm}: {str(error).splitlines()[0]}")
        return float("inf")


def searched(options: Options, space: Space) -> tuple[dict[Arm, float], float]:
    """The step of every arm, and the seconds of all trials."""
    begin_s = time.monotonic()
    found = {}
    arms = space.arms()
    for number, arm in enumerate(arms, 1):
        found[arm] = median_s(options, arm)
        say(f"{number} of {len(arms)}: {arm}: {found[arm] * 1e3:.0f} ms")
    return found, time.monotonic() - begin_s


def row_of(case: Case, *, short: bool) -> dict[str, Any]:
    """Runs both searches for a network."""
    with tempfile.TemporaryDirectory() as folder:
        options = Options(
            command=command_of(case),
            allowed=ALLOWED,
            trials=2 if short else TRIALS,
            steps=6 if short else STEPS,
            timeout_s=180,
            file=Path(folder) / "commlayer.toml",
        )
        report, tune_s = tuned(options, short=short)
        say(f"{case.title}: tune took {tune_s:.0f} s: {report.summary}")
        chosen = report.outcome.chosen.arm if report.outcome else Arm()
        if report.space is None:  # little to win, so nothing was tried: there is no space to search
            return {"case": case.title, "tune_s": tune_s, "chosen": str(chosen), "summary": report.summary}
        found, search_s = searched(options, report.space)
        best = min(found, key=lambda arm: found[arm])
        again: dict[Arm, list[float]] = {arm: [] for arm in (Arm(), best, chosen)}
        for _ in range(TURNS):
            for arm, times in again.items():
                times.append(median_s(options, arm))
    again_s = {arm: statistics.median(times) for arm, times in again.items()}
    row = {
        "case": case.title,
        "arms": len(found),
        "tune_s": tune_s,
        "search_s": search_s,
        "default_s": again_s[Arm()],
        "best": str(best),
        "best_s": min(again_s.values()),
        "chosen": str(chosen),
        "chosen_s": again_s[chosen],
        "steps_s": {str(arm): seconds for arm, seconds in found.items()},
        "summary": report.summary,
    }
    say(f"{case.title}: {is_met(row)}: {row['chosen']} {row['chosen_s']:.3f} s, {row['best']} {row['best_s']:.3f} s")
    return row


def is_met(row: Mapping[str, Any]) -> bool:
    """Whether the choice is near the best, not worse than the default, and was found in a part of the time."""
    if "best_s" not in row:
        return bool(row["chosen"] == str(Arm()))
    near = row["chosen_s"] <= (1 + NEAR) * row["best_s"]
    never_worse = row["chosen"] == str(Arm()) or row["chosen_s"] <= row["default_s"]
    return bool(near and never_worse and row["tune_s"] <= PART * row["search_s"])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| network | as it is | best of all | its step | chosen | its step | beside the best | time | met |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        met = "yes" if is_met(row) else "**no**"
        if "best_s" not in row:
            lines.append(f"| {row['case']} | little to win | | | {row['chosen']} | | | {row['tune_s']:.0f} s | {met} |")
            continue
        lines.append(
            f"| {row['case']} | {row['default_s'] * 1e3:.0f} ms | {row['best']} | {row['best_s'] * 1e3:.0f} ms | "
            f"{row['chosen']} | {row['chosen_s'] * 1e3:.0f} ms | {row['chosen_s'] / row['best_s'] - 1:+.1%} | "
            f"{row['tune_s']:.0f} of {row['search_s']:.0f} s ({row['tune_s'] / row['search_s']:.0%}) | {met} |"
        )
    return "\n".join(lines)


def tables(kept: Content) -> dict[str, str]:
    """The table of the page."""
    rows = [kept["rows"][name] for name in NAMES if name in kept["rows"]]
    about = f"{kept['machine']['cpu']}, {kept['machine']['cores']} cores; {kept['arms']} settings at most in the space."
    return {"measured": f"{table(rows)}\n\n{about}"}


BENCHMARK = Benchmark(RESULTS, PAGE, tables, {"rows": {}}, is_good=lambda kept: all(map(is_met, kept["rows"].values())))


def main() -> int:
    """Exit status: 1 if a target is not met. In a quick run, nobody searches five settings in a tenth of the time."""
    asked = options(__doc__, only=NAMES, quick="a small space", table=True).parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)

    def measure(kept: Content, name: str) -> None:
        kept["rows"][name] = row_of(CASES[name], short=asked.quick)
        arms = max(row.get("arms", 0) for row in kept["rows"].values())
        kept |= {"machine": machine.facts(), "arms": arms}

    return BENCHMARK.main(asked, asked.only or NAMES, measure)


if __name__ == "__main__":
    sys.exit(main())
