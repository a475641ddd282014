"""What authentication costs: all-reduce over UDP on loopback with COMMLAYER_AUTH off, header and full, in turn.

    python bench/auth_cost.py                 7 rounds (about 8 minutes); keeps bench/results/auth_cost.json
    python bench/auth_cost.py --rounds 21     for a narrower spread

Loopback is the worst case: nothing but the two processors limits it. The policies take turns within each round, in
another order each time, and are compared within the round, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/auth_cost.json"
AUTHS = ("off", "header", "full")
LIMIT = 1.03
"""The default may take at most this much longer."""

CASES = {
    "16M, MTU 9000": ("--sizes 16M --iters 20", "0"),
    "16M, MTU 1500": ("--sizes 16M --iters 20", "1500"),
    "4K": ("--sizes 4K --iters 2000 --warmup 100", "0"),
}


def measure(case: str, auth: str) -> dict[str, Any]:
    """One run of two ranks; the bench's result. Raises RuntimeError when it could not be done or was wrong."""
    arguments, mtu = CASES[case]
    environment = os.environ | {"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo", "COMMLAYER_MTU": mtu}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = (
            f"{sys.executable} -m commlayer bench all_reduce --ranks 2 --backends commlayer --rounds 1 {arguments}"
        )
        done = subprocess.run(
            [*command.split(), "--json", str(out)],
            cwd=ROOT,
            env=environment | {"COMMLAYER_AUTH": auth},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{case}, auth {auth}: status {done.returncode}\n{done.stderr}")
        document: dict[str, Any] = json.loads(out.read_text())
    (result,) = document["results"]
    return {"p50_us": result["p50_us"], "busbw_gb_s": result["busbw_gb_s"], "machine": document["machine"]}


def ratios(rounds: list[dict[str, dict[str, Any]]], auth: str) -> list[float]:
    """Per round, how many times as long as without authentication the median iteration took."""
    return [each[auth]["p50_us"] / each["off"]["p50_us"] for each in rounds]


def row(case: str, auth: str, rounds: list[dict[str, dict[str, Any]]]) -> str:
    """One line of the table, as Markdown."""
    figures = sorted(ratios(rounds, auth))
    p50_us = statistics.median(each[auth]["p50_us"] for each in rounds)
    quarter = len(figures) // 4
    spread = f"{figures[quarter]:.3f} to {figures[-1 - quarter]:.3f}"
    return f"| {case} | {auth} | {p50_us:.0f} | {statistics.median(figures):.3f} | {spread} |"


def main() -> int:
    """0 when the default keeps within its limit in every case, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one (may be repeated)")
    arguments = parser.parse_args()
    kept: dict[str, Any] = {}
    lines = ["| all-reduce | auth | median, us | over off | quartiles |", "|---|---|---|---|---|"]
    good = True
    for case in arguments.case or CASES:
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(arguments.rounds):
            order = [AUTHS[(number + i) % len(AUTHS)] for i in range(len(AUTHS))]
            rounds.append({auth: measure(case, auth) for auth in order})
            print(f"{case}, round {number + 1}: " + ", ".join(f"{a} {rounds[-1][a]['p50_us']:.0f} us" for a in AUTHS))
        kept[case] = rounds
        lines += [row(case, auth, rounds) for auth in AUTHS]
        good = good and statistics.median(ratios(rounds, "header")) <= LIMIT
    print("\n".join(lines))
    RESULTS.write_text(json.dumps({"schema": 1, "cases": kept}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
