"""Bounded loss, priorities and several NICs on stressed networks, beside gloo tuned for each network.

    python -m bench.stress               everything (about 20 minutes, as root); writes docs/stress.md
    python -m bench.stress --only loss1  one case, merged into the kept results (may be repeated)
    python -m bench.stress --table       only the tables of the kept results
    python -m bench.stress --quick       few iterations, to see that it works; keeps nothing

Every run is one `commlayer bench` command, kept in bench/results/stress.json. To tune gloo, another run
before it measures every variant of gloo a few times; the fastest ones take part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from bench.cases import CASES, GLOO_TUNED, wire_of
from bench.claims import CLAIMS
from bench.matrix import P50, P99, ROOT, Matrix, Result, Runs, machines, measure
from commlayer.tools.bench.spec import BackendSpec


def tuned(runs: Iterable[Result]) -> list[str]:
    """The fastest variant of gloo, by its median, for each congestion control and wire."""
    fastest: dict[tuple[str | None, str], Result] = {}
    for result in runs:
        key = BackendSpec.parse(result["backend"]).tcp_cc, wire_of(result["backend"])
        if key not in fastest or result["p50_us"] < fastest[key]["p50_us"]:
            fastest[key] = result
    return [result["backend"] for result in fastest.values()]


def run(name: str, quick: bool) -> dict[str, Any]:
    """Tunes gloo if the case says so, and measures. Raises BenchError."""
    case, environ = CASES[name], dict(CASES[name].environ)
    rounds, iters = (1, 2) if quick else (case.rounds, case.iters)
    if quick and case.scenario == "nic_dies":
        iters = case.iters  # enough iterations before and after the event
    tuning: dict[str, Any] | None = None
    backends = list(case.backends)
    if case.tunes_gloo:
        tuning = measure(f"{name}, gloo tuned", case.command(GLOO_TUNED, 1, 1 if quick else 2), environ)
        backends += tuned(tuning["results"])
    measured = measure(name, case.command(backends, rounds, iters), environ)
    if tuning is not None:
        kept = ("backend", "p50_us", "rounds_us", "wrong")
        measured["tuning"] = {
            "command": tuning["command"],
            "results": [{key: result[key] for key in kept} for result in tuning["results"]],
        }
    return measured


def claims_table(runs: Runs) -> str:
    """The claims, with their figures."""
    lines = [
        "| 4 hosts, 200 Mbit/s in all | wire | figure | commlayer | compared with | ratio | target | reached |",
        "|---|---|---|---|---|---|---|---|",
        *(claim.row(runs) for claim in CLAIMS),
    ]
    if measured := machines(runs):
        lines += ["", f"Measured on {measured}."]
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


MATRIX = Matrix(
    CASES,
    run,
    CLAIMS,
    {"claims": claims_table, "figures": figures_table},
    ROOT / "bench/results/stress.json",
    ROOT / "docs/stress.md",
    may_fail=frozenset(name for name, case in CASES.items() if case.may_fail),
)

if __name__ == "__main__":
    sys.exit(MATRIX.main(__doc__))
