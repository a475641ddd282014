"""A matrix of bench runs with claims about them: measures the runs, keeps them as JSON, writes the tables of a page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.driver import BenchError, Benchmark, Content
from bench.harness.options import options

ROOT = Path(__file__).parents[2]

Result = dict[str, Any]
"""One backend at one size: an entry of `results` in a bench run's JSON."""

Runs = Mapping[str, Any]
"""The kept runs by name. A run that could not be done has only `failed`, the reason."""


@dataclass(frozen=True)
class Metric:
    """How one figure of a bench result is compared and printed."""

    name: str
    of: Callable[[Result], float]
    text: Callable[[float], str]
    higher_is_better: bool = False

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better our figure is: more than 1 if it is better."""
        return ours / theirs if self.higher_is_better else theirs / ours


def time_text(us: float) -> str:
    """A time of some microseconds, to read."""
    return f"{us:.0f} µs" if us < 1e4 else f"{us / 1e3:.0f} ms"


# The median iteration, not the mean: on a busy machine more thread switches stretch the tail.
P50 = Metric("p50", lambda result: result["p50_us"], time_text)
P99 = Metric("p99", lambda result: result["p99_us"], time_text)
LINK_SHARE = Metric("busbw", lambda result: result["link_share"], lambda share: f"{share:.1%} of the link", True)


def best(figures: Mapping[str, float], metric: Metric) -> str:
    """The name of the best figure."""
    return (max if metric.higher_is_better else min)(figures, key=figures.__getitem__)


@dataclass(frozen=True)
class Figures:
    """The outcome of a claim."""

    ours: str
    other: str
    ratio: float | None
    reached: bool


TO_COMPARE = "to compare"
"""The target of a row that only stands beside others."""


@dataclass(frozen=True)
class Claim:
    """One row of the table: a figure of a run, and its target."""

    run: str
    case: str
    variant: str
    """Size or wire."""
    figure: str
    target: str
    outcome: Callable[[Runs], Figures]
    """Raises KeyError or ValueError if something it needs has not been measured."""

    def evaluate(self, runs: Runs) -> Figures | None:
        """None if something it needs has not been measured."""
        try:
            return self.outcome(runs)
        except (KeyError, ValueError):
            return None

    def row(self, runs: Runs) -> str:
        """The row in Markdown."""
        start, found = f"| {self.case} | {self.variant} | {self.figure} |", self.evaluate(runs)
        if found is None:
            return f"{start} not measured | | | {self.target} | |"
        ratio = "" if found.ratio is None else f"{found.ratio:.2f}x"
        reached = "" if self.target == TO_COMPARE else "yes" if found.reached else "**no**"
        return f"{start} {found.ours} | {found.other} | {ratio} | {self.target} | {reached} |"


def measure(name: str, arguments: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs one `commlayer bench` command and returns its JSON. Raises BenchError if it fails."""
    settings = dict(environ or {})
    words = ["commlayer", "bench", *arguments.split()]
    print(f"## {name}: {' '.join([*(f'{key}={value}' for key, value in settings.items()), *words])}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", *words, "--json", str(out)]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}).returncode
        if not out.exists():
            raise BenchError(f"{name}: the bench ended with status {status}")
        run: dict[str, Any] = json.loads(out.read_text())
    run["command"] = words  # without our temporary file
    run["environ"] = settings
    return run


def machines(runs: Runs) -> str:
    """The machines and commits of the runs."""
    commits: dict[str, dict[str, None]] = {}
    for about in (run["machine"] for run in runs.values() if "machine" in run):
        text = "{cores} cores of {cpu}, {kernel}, torch {torch}".format(**about)
        commits.setdefault(text, {})[about["git_commit"]] = None
    return "; ".join(f"{text}, commits {', '.join(of)}" for text, of in commits.items())


@dataclass(frozen=True)
class Matrix:
    """The script of a matrix: its runs, its claims, and where results and tables go."""

    names: Iterable[str]
    run: Callable[[str, bool], dict[str, Any]]
    """Measures the run of a name, with few iterations if the second argument is true. Raises BenchError."""
    claims: Sequence[Claim]
    tables: Mapping[str, Callable[[Runs], str]]
    """The parts of the page, by marker."""
    results: Path
    page: Path
    may_fail: frozenset[str] = frozenset()
    """Runs whose failure is a result, too."""

    @property
    def benchmark(self) -> Benchmark:
        """What is kept, and its page."""

        def tables(content: Content) -> dict[str, str]:
            return {name: table(content["runs"]) for name, table in self.tables.items()}

        return Benchmark(self.results, self.page, tables, {"schema": 1, "runs": {}}, is_good=self._is_good)

    def _is_good(self, content: Content) -> bool:
        """Whether every claim holds, of those that were measured."""
        found = [claim.evaluate(content["runs"]) for claim in self.claims]
        return all(figures.reached for figures in found if figures is not None)

    def main(self, description: str | None) -> int:
        """0 if every claim measured so far holds, 1 if one does not, 2 if a run could not be done."""
        names = list(self.names)
        asked = options(description, only=names, quick="few iterations", table=True).parse_args()

        def measured(content: Content, name: str) -> None:
            try:
                content["runs"][name] = self.run(name, asked.quick)
            except BenchError as error:
                content["runs"][name] = {"failed": str(error)}
                if name not in self.may_fail:
                    raise

        return self.benchmark.main(asked, asked.only or names, measured)
