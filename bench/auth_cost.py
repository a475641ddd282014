"""The cost of authentication: all-reduce over UDP on loopback with COMMLAYER_AUTH off, header and full, in turns.

    python -m bench.auth_cost                 7 rounds (about 8 minutes); keeps bench/results/auth_cost.json
    python -m bench.auth_cost --rounds 21     for a narrower spread

Loopback is the worst case: only the processor limits it. The settings take turns within each round, in another order
each time, and are compared within the round, so that a slower machine slows all of them.
"""

from __future__ import annotations

import math
import statistics
import sys
from typing import Any

from bench.harness.matrix import ROOT, measure
from bench.harness.options import options
from bench.harness.page import markdown
from bench.harness.results import read_results, write_results
from bench.harness.turns import rotated

RESULTS = ROOT / "bench/results/auth_cost.json"
AUTHS = ("off", "header", "full")
LIMITS = {"16M, MTU 9000": 1.10}
"""The default may take at most this many times as long as `off`, in these cases."""

CASES = {
    "16M, MTU 9000": ("--sizes 16M --iters 20", "0"),
    "16M, MTU 1500": ("--sizes 16M --iters 20", "1500"),
    "4K": ("--sizes 4K --iters 2000 --warmup 100", "0"),
}


def run(case: str, auth: str) -> dict[str, Any]:
    """One run of two ranks. Raises BenchError if it fails, ValueError if a result is wrong."""
    arguments, mtu = CASES[case]
    environ = {"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo", "COMMLAYER_MTU": mtu, "COMMLAYER_AUTH": auth}
    document = measure(case, f"all_reduce --ranks 2 --backends commlayer --rounds 1 {arguments}", environ)
    (result,) = document["results"]
    if result["wrong"]:
        raise ValueError(f"{case}, auth {auth}: {result['wrong']} wrong elements")
    return {"p50_us": result["p50_us"], "busbw_gb_s": result["busbw_gb_s"], "machine": document["machine"]}


def ratios(rounds: list[dict[str, dict[str, Any]]], auth: str) -> list[float]:
    """The median iteration over that without authentication, per round."""
    return [medians[auth]["p50_us"] / medians["off"]["p50_us"] for medians in rounds]


def row(case: str, auth: str, rounds: list[dict[str, dict[str, Any]]]) -> list[str]:
    """One line of the table."""
    figures = sorted(ratios(rounds, auth))
    p50_us = statistics.median(medians[auth]["p50_us"] for medians in rounds)
    quarter = len(figures) // 4
    spread = f"{figures[quarter]:.3f} to {figures[-1 - quarter]:.3f}"
    return [case, auth, f"{p50_us:.0f}", f"{statistics.median(figures):.3f}", spread]


def main() -> int:
    """0 if the default keeps its limits, else 1."""
    arguments = options(__doc__, only=CASES, rounds=7).parse_args()
    kept = read_results(RESULTS, {"schema": 1, "cases": {}})
    lines, good = [], True
    for case in arguments.only or CASES:
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(arguments.rounds):
            rounds.append({auth: run(case, auth) for auth in rotated(AUTHS, number)})
            print(f"{case}, round {number + 1}: " + ", ".join(f"{a} {rounds[-1][a]['p50_us']:.0f} us" for a in AUTHS))
        kept["cases"][case] = rounds
        lines += [row(case, auth, rounds) for auth in AUTHS]
        good = good and statistics.median(ratios(rounds, "full")) <= LIMITS.get(case, math.inf)
    print(markdown(["all-reduce", "auth", "median, us", "over off", "quartiles"], lines))
    write_results(RESULTS, kept)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
