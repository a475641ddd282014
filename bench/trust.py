"""Why trust the backend: runs each proof, keeps its figures, writes the tables of docs/trust.md.

    python -m bench.trust                    everything (hours: PyTorch's tests and the soak are long)
    python -m bench.trust --only simulation  one of them, merged into what is there
    python -m bench.trust --table            only the tables, from what is there

Each figure is cut out of the output of a command that can be run by itself; it is kept in bench/results/trust.json with
the commit and the time it took.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.driver import BenchError, Benchmark
from bench.harness.options import options
from bench.harness.page import markdown
from bench.harness.results import today

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/trust.json"
PAGE = ROOT / "docs/trust.md"
LOGS = ROOT / "out/trust"

Figures = dict[str, str]
"""The figures of a proof, by name, as text that its command printed."""


def found(*patterns: str) -> Callable[[str], Figures]:
    """A reader of output that returns the named groups of each pattern's last match, or raises ValueError."""

    def read(output: str) -> Figures:
        figures: Figures = {}
        for pattern in patterns:
            matches = list(re.finditer(pattern, output, re.MULTILINE))
            if not matches:
                raise ValueError(f"the output has nothing like {pattern!r}")
            figures |= {name: value for name, value in matches[-1].groupdict().items() if value is not None}
        return figures

    return read


def sanitizers(output: str) -> Figures:
    """Numbers of native tests that ran plain and under each sanitizer."""
    runs = re.findall(r"^-- build/(test|asan|tsan)/", output, re.MULTILINE)
    counts = {f"{variant}_runs": str(runs.count(variant)) for variant in ("test", "asan", "tsan")}
    return counts | found(r"^native: (?P<passed>\d+) passed")(output)


def table(output: str) -> Figures:
    """The last table in Markdown."""
    lines = [line for line in output.splitlines() if line.startswith("|")]
    start = max(i for i, line in enumerate(lines) if set(line) <= set("|-: ")) - 1
    return {"table": "\n".join(lines[start:]), "rows": str(len(lines) - start - 2)}


def torch_suite(output: str) -> Figures:
    """The counts of tests.torch_suite as a table, and the number of tests that pass with gloo only."""
    names = ("gate", "world", "gloo passed", "failed", "skipped", "commlayer passed", "failed", "skipped")
    rows = re.findall(r"^(\w+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", output, re.MULTILINE)
    sums = {"gloo": str(sum(int(row[2]) for row in rows)), "commlayer": str(sum(int(row[5]) for row in rows))}
    worse = found(r"^(?P<worse>\d+) tests pass with gloo and not with commlayer")(output)
    return {"table": markdown(names, rows)} | sums | worse


PYTEST = r"(?P<tests>\d+) passed"


@dataclass(frozen=True)
class Proof:
    """One command, and a line of text for its figures."""

    what: str
    command: str
    read: Callable[[str], Figures]
    text: str
    """Template for the figures, for `str.format`."""
    allowed: tuple[int, ...] = (0,)
    """Exit codes of a proof; others mean failure."""


PROOFS = {
    "native": Proof(
        "C tests",
        "make native-test",
        sanitizers,
        "{passed} runs passed: {test_runs} plain, {asan_runs} with ASan and UBSan, {tsan_runs} with TSan",
    ),
    "simulation": Proof(
        "Simulated seeds",
        "make sim",
        found(
            r"^(?P<seeds>\d+) seeds, (?P<failed>\d+) failed; (?P<hours>[\d.]+) virtual hours",
            r"^operations: +(?P<right>\d+) right, (?P<messages>\d+) of them messages received; (?P<errors>\d+) with a",
            r"^packets: +(?P<packets>\d+) sent",
            r"^faults: +(?P<faults>.*?);",
        ),
        "{seeds} seeds, {failed} failed; {packets} packets, {right} operations right ({messages} received messages), "
        "{errors} ended by a typed error as they had to; faults: {faults}",
    ),
    "simulation-asan": Proof(
        "Simulated seeds with ASan and UBSan",
        "make sim-asan",
        found(r"^(?P<seeds>\d+) seeds, (?P<failed>\d+) failed"),
        "{seeds} seeds, {failed} failed",
    ),
    "mutants": Proof(
        "Defects put into the engine on purpose",
        "make sim-mutants",
        found(r"^(?P<mutants>\d+) mutants, (?P<caught>\d+) found"),
        "{caught} of {mutants} found by the simulator",
        allowed=(0, 1),  # 1: a mutant survived; the figure shows it
    ),
    "fuzz": Proof(
        "Fuzzed packets (ASan and UBSan)",
        "make fuzz",
        found(r"^(?P<packets>\d+) packets in", r"^(?P<findings>\d+) findings"),
        "{packets} packets, {findings} findings",
    ),
    "attack": Proof(
        "Live all-reduce under attack: malformed, truncated, oversized, replayed, foreign and forged packets",
        ".venv/bin/python -m pytest -q tests/process/attack",
        found(PYTEST),
        "{tests} tests passed: every sum right, forged packets accepted: 0",
    ),
    "faults": Proof(
        "Fault cases on real processes", "make faults", table, "{rows} cases, each with its error on every survivor"
    ),
    "leaks": Proof(
        "100 cycles of init and destroy, crashed jobs",
        ".venv/bin/python -m pytest -q tests/process/faults/test_leaks.py",
        found(PYTEST),
        "{tests} tests passed: no thread, descriptor, mapping or file of shared memory left",
    ),
    "soak": Proof(
        "Soak: random collectives and subgroups, every result checked",
        "make soak MINUTES=60",
        found(
            r"^rank 0: (?P<operations>\d+) operations in (?P<jobs>\d+) jobs, all right",
            r"^  after \d+ jobs (?P<before>\{.*\})",
            r"^  at the end +(?P<after>\{.*\})",
        ),
        "{operations} operations per rank in {jobs} jobs, all right; a process held `{before}` when warm and `{after}` "
        "at the end",
    ),
    "torch": Proof(
        "PyTorch's own tests of a backend, in worlds of 2 and 3",
        "make test-torch",
        torch_suite,
        "{gloo} pass with gloo, {commlayer} with commlayer; {worse} pass with gloo only",
    ),
    "auth": Proof(
        "Cost of authentication",
        ".venv/bin/python -m bench.auth_cost",
        table,
        "see below",
        allowed=(0, 1),  # 1: above the limit; the table shows it
    ),
}
TABLES = {"torch": "PyTorch's tests, beside gloo", "faults": "Faults", "auth": "Cost of authentication"}

Kept = dict[str, dict[str, Any]]


def prove(name: str) -> dict[str, Any]:
    """Runs one proof. Raises BenchError if its command failed or printed no figures."""
    proof = PROOFS[name]
    print(f"## {name}: {proof.command}", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    start, lines = time.monotonic(), []
    with (
        subprocess.Popen(
            proof.command.split(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        (LOGS / f"{name}.log").open("w") as log,
    ):
        for line in process.stdout or ():
            log.write(line)
            lines.append(line)
    seconds = time.monotonic() - start
    output = "".join(lines)
    if process.returncode not in proof.allowed:
        raise BenchError(f"{name}: {proof.command!r} ended with {process.returncode}; see {LOGS / name}.log")
    try:
        figures = proof.read(output)
    except ValueError as error:
        raise BenchError(f"{name}: {error}; see {LOGS / name}.log") from error
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        "command": proof.command,
        "commit": commit.stdout.strip(),
        "date": today(),
        "seconds": round(seconds),
        "figures": figures,
    }


def page(kept: Kept) -> str:
    """The tables of docs/trust.md, from the proofs alone."""
    lines = ["| proof | result | command | took | at commit |", "|---|---|---|---|---|"]
    for name, proof in PROOFS.items():
        if name not in kept:
            lines.append(f"| {proof.what} | not run yet | `{proof.command}` | | |")
            continue
        one = kept[name]
        text = proof.text.format(**one["figures"])
        took = "" if one["seconds"] is None else f"{one['seconds']} s"  # None: it ran as a part of another proof
        lines.append(f"| {proof.what} | {text} | `{proof.command}` | {took} | {one['commit']} |")
    for name, title in TABLES.items():
        if name in kept:
            lines += ["", f"## {title}", "", kept[name]["figures"]["table"]]
    return "\n".join(lines)


BENCHMARK = Benchmark(RESULTS, PAGE, lambda kept: {"proofs": page(kept)})


def main() -> int:
    """0 if every proof that ran holds, 2 if one does not."""
    asked = options(__doc__, only=PROOFS, table=True).parse_args()

    def measure(kept: Kept, name: str) -> None:
        kept.pop(name, None)  # the page must not show a proof that fails now
        kept[name] = prove(name)

    return BENCHMARK.main(asked, asked.only or list(PROOFS), measure)


if __name__ == "__main__":
    sys.exit(main())
