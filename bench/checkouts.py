"""Two built checkouts of commlayer in turns: whether a change made collectives slower.

    git worktree add ../before REVISION && make -C ../before native
    python -m bench.checkouts ../before .             9 rounds, about 6 minutes

Each round runs both checkouts one after the other, in alternating order, and compares them within the round, so that a
machine that slows down slows both. Reported are the median and the quartiles of after / before, of the median iteration
of each run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

RANKS = (2, 4)
SIZES = {"4K": ("--iters", "2000", "--warmup", "200"), "1M": ("--iters", "200", "--warmup", "20")}
WIRES = {"shared memory": {"COMMLAYER_SHM": "1"}, "UDP": {"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo"}}


def measure(checkout: Path, wire: str, ranks: int, size: str) -> float:
    """Median time of an all-reduce in microseconds, of one run of a checkout. Raises RuntimeError if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [".venv/bin/python", "-m", "commlayer", "bench", "all_reduce", "--backends", "commlayer"]
        arguments = ["--ranks", str(ranks), "--sizes", size, "--rounds", "1", *SIZES[size], "--json", str(out)]
        done = subprocess.run(
            [*command, *arguments], cwd=checkout, env=os.environ | WIRES[wire], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{checkout}: bench ended with status {done.returncode}\n{done.stderr}")
        (result,) = json.loads(out.read_text())["results"]
    return float(result["p50_us"])


def row(case: tuple[str, int, str], rounds: Sequence[tuple[float, float]]) -> str:
    """One line of the table, as Markdown."""
    ratios = sorted(after / before for before, after in rounds)
    quarter = len(ratios) // 4
    before, after = (statistics.median(each) for each in zip(*rounds, strict=True))
    spread = f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}"
    wire, ranks, size = case
    return f"| {size} | {ranks} | {wire} | {before:.0f} | {after:.0f} | {statistics.median(ratios):.3f} | {spread} |"


def main() -> None:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    print("| all-reduce | ranks | wire | before, us | after, us | after / before | quartiles |")
    print("|---|---|---|---|---|---|---|")
    for case in itertools.product(WIRES, RANKS, SIZES):
        rounds = []
        for number in range(arguments.rounds):
            order = (arguments.before, arguments.after)[:: 1 if number % 2 == 0 else -1]
            taken = {checkout: measure(checkout, *case) for checkout in order}
            rounds.append((taken[arguments.before], taken[arguments.after]))
        print(row(case, rounds), flush=True)


if __name__ == "__main__":
    main()
