"""What bounded loss, priorities and several NICs do on stressed networks, beside gloo tuned for each of them.

    python -m bench.stress               everything (about 20 minutes, as root); writes docs/stress.md
    python -m bench.stress --only loss1  one case, merged into the results that are there (may be repeated)
    python -m bench.stress --table       only the tables, from the results that are there
    python -m bench.stress --quick       few iterations and no result kept: does everything work?

Every run is one `commlayer bench` command, kept in bench/results/stress.json. Where gloo is tuned there is one more
before it: every variant of gloo a few times, of which the fastest go on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.cases import CASES, GLOO_TUNED, wire_of
from bench.claims import CLAIMS, Runs, evaluate
from commlayer.tools.bench.matrix import (
    P50,
    P99,
    BenchError,
    Result,
    keep,
    machines,
    measure,
    read_kept,
    verdict,
    write_between,
)
from commlayer.tools.bench.spec import BackendSpec

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/stress.json"
PAGE = ROOT / "docs/stress.md"
CLAIMS_BEGIN, CLAIMS_END = "<!-- claims:begin -->", "<!-- claims:end -->"
FIGURES_BEGIN, FIGURES_END = "<!-- figures:begin -->", "<!-- figures:end -->"


def tuned(runs: Iterable[Result]) -> list[str]:
    """The fastest variant of gloo, by its median, for each congestion control and wire."""
    fastest: dict[tuple[str | None, str], Result] = {}
    for result in runs:
        key = BackendSpec.parse(result["backend"]).tcp_cc, wire_of(result["backend"])
        if key not in fastest or result["p50_us"] < fastest[key]["p50_us"]:
            fastest[key] = result
    return [result["backend"] for result in fastest.values()]


def run_case(name: str, *, quick: bool) -> dict[str, Any]:
    """Tunes gloo where that is wanted, and measures. Raises BenchError."""
    case, environ = CASES[name], dict(CASES[name].environ)
    rounds, iters = (1, 2) if quick else (case.rounds, case.iters)
    if quick and case.scenario == "nic_dies":
        iters = case.iters  # before the event and after
    tuning: dict[str, Any] | None = None
    backends = list(case.backends)
    if case.tunes_gloo:
        tuning = measure(f"{name}, gloo tuned", case.command(GLOO_TUNED, 1, 1 if quick else 2), ROOT, environ)
        backends += tuned(tuning["results"])
    run = measure(name, case.command(backends, rounds, iters), ROOT, environ)
    if tuning is not None:
        kept = ("backend", "p50_us", "rounds_us", "wrong")
        run["tuning"] = {
            "command": tuning["command"],
            "results": [{key: result[key] for key in kept} for result in tuning["results"]],
        }
    return run


def claims_table(runs: Runs) -> str:
    """What was to be reached, and what was."""
    lines = [
        "| 4 hosts, 200 Mbit/s in all | wire | figure | commlayer | compared with | ratio | target | reached |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        start = f"| {CASES[claim.run].title} | {claim.wire} | {claim.figure} |"
        found = evaluate(claim, runs)
        if found is None:
            lines.append(f"{start} not measured | | | {claim.target} | |")
            continue
        ratio = "" if found.ratio is None else f"{found.ratio:.2f}x"
        reached = "" if claim.target == "to compare" else verdict(found.reached)
        lines.append(f"{start} {found.ours} | {found.other} | {ratio} | {claim.target} | {reached} |")
    measured = [run for run in runs.values() if "machine" in run]
    if measured:
        lines += ["", f"Measured on {machines(measured)}."]
    return "\n".join(lines)


def figures_table(runs: Runs) -> str:
    """Every variant of every case."""
    lines = [
        "| case | variant | p50 | p99 | spread of rounds | samples | packets lost | not counted | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        if "failed" in runs.get(name, {}):
            lines.append(f"| {case.title} | failed: {runs[name]['failed']} | | | | | | | |")
        for result in runs.get(name, {}).get("results", ()):
            packets = result["packets"]
            lost = f"{packets['packets_lost'] / packets['packets_sent']:.2%}" if packets else ""
            not_counted = f"{result['not_counted']:.3%}" if "loss_bound" in result["backend"] else ""
            lines.append(
                f"| {case.title} | {result['backend']} | {P50.text(P50.of(result))} | {P99.text(P99.of(result))} | "
                f"{result['spread']:.0%} | {result['samples']} | {lost} | {not_counted} | {result['wrong']} |"
            )
    return "\n".join(lines)


def write_page(runs: Runs, page: Path) -> bool:
    """Writes both tables into the page. False when it does not have the markers."""
    claims = write_between(page, CLAIMS_BEGIN, CLAIMS_END, claims_table(runs))
    return write_between(page, FIGURES_BEGIN, FIGURES_END, figures_table(runs)) and claims


def main() -> int:
    """0 when every claim measured so far holds, 1 when one does not, 2 when a run could not be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(CASES), help="measure this case (may be repeated)")
    parser.add_argument("--table", action="store_true", help="measure nothing, only write the tables")
    parser.add_argument("--quick", action="store_true", help="few iterations, print the tables, keep nothing")
    arguments = parser.parse_args()

    kept = read_kept(RESULTS)
    runs: dict[str, Any] = {} if arguments.quick else kept["runs"]
    failures = []
    for name in [] if arguments.table else arguments.only or list(CASES):
        try:
            runs[name] = run_case(name, quick=arguments.quick)
        except BenchError as error:
            failures += [str(error)] * (not CASES[name].may_fail)
            runs[name] = {"failed": str(error)}
        if not arguments.quick:
            keep(RESULTS, kept)
    print(claims_table(runs), figures_table(runs), sep="\n\n")
    if not arguments.quick and not write_page(runs, PAGE):
        print(f"{PAGE.name} lacks a marker, such as {CLAIMS_BEGIN}: tables not written there", file=sys.stderr)
    for failure in failures:
        print(failure, file=sys.stderr)
    if failures:
        return 2
    found = [evaluate(claim, runs) for claim in CLAIMS]
    return 0 if all(figures.reached for figures in found if figures is not None) else 1


if __name__ == "__main__":
    sys.exit(main())
