"""What matrices of bench runs share: how a figure is read and printed, how a run is made and its JSON kept.

A matrix is a script in the checkout's folder `bench/`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
"""One backend at one size: an entry of `results` in a bench run's JSON."""


@dataclass(frozen=True)
class Metric:
    """How one figure of a bench result is compared and printed."""

    name: str
    of: Callable[[Result], float]
    text: Callable[[float], str]
    higher_is_better: bool = False

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better: above 1 ours is."""
        return ours / theirs if self.higher_is_better else theirs / ours


def time_text(us: float) -> str:
    """A time of some microseconds, to read."""
    return f"{us:.0f} µs" if us < 1e4 else f"{us / 1e3:.0f} ms"


# the median iteration, not the mean: a busy machine stretches the tails of whoever switches threads more often
P50 = Metric("p50", lambda result: result["p50_us"], time_text)
P99 = Metric("p99", lambda result: result["p99_us"], time_text)
LINK_SHARE = Metric("busbw", lambda result: result["link_share"], lambda share: f"{share:.1%} of the link", True)


def best(figures: Mapping[str, float], metric: Metric) -> str:
    """The name of the best figure."""
    return (max if metric.higher_is_better else min)(figures, key=figures.__getitem__)


def verdict(reached: bool) -> str:
    """As the tables say it."""
    return "yes" if reached else "**no**"


class BenchError(RuntimeError):
    """A bench run could not be done."""


def measure(name: str, arguments: str, cwd: Path, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs one `commlayer bench` command in folder `cwd` and returns its JSON. Raises BenchError if it cannot."""
    settings = dict(environ or {})
    words = ["commlayer", "bench", *arguments.split()]
    print(f"## {name}: {' '.join([*(f'{key}={value}' for key, value in settings.items()), *words])}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", *words, "--json", str(out)]
        status = subprocess.run(command, cwd=cwd, env={**os.environ, **settings}).returncode
        if not out.exists():
            raise BenchError(f"{name}: the bench ended with status {status}")
        run: dict[str, Any] = json.loads(out.read_text())
    run["command"] = words  # without our temporary file
    run["environ"] = settings
    return run


def read_kept(path: Path) -> dict[str, Any]:
    """What was measured before: {"schema": 1, "runs": {name: run}}."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schema": 1, "runs": {}}
    return kept


def keep(path: Path, kept: dict[str, Any]) -> None:
    """Writes it, to be called after each run: the next one may be interrupted."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")


def machines(runs: Iterable[Mapping[str, Any]]) -> str:
    """On what the runs were measured, and of which commits."""
    commits: dict[str, dict[str, None]] = {}
    for run in runs:
        about = run["machine"]
        text = "{cores} cores of {cpu}, {kernel}, torch {torch}".format(**about)
        commits.setdefault(text, {})[about["git_commit"]] = None
    return "; ".join(f"{text}, commits {', '.join(of)}" for text, of in commits.items())


def write_between(page: Path, begin: str, end: str, text: str) -> bool:
    """Replaces what is between two markers. False when the page does not have them."""
    content = page.read_text() if page.exists() else ""
    before, found_begin, rest = content.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        return False
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
    return True
