"""Runs torch's own DistributedTest on gloo and on commlayer, and compares them test by test.

    python -m tests.torch_suite                       # worlds of 2 and 3 ranks, some minutes
    python -m tests.torch_suite --tests FILE          # only the tests named there, one a line

Every test that passes with the reference must pass with ours: that is the exit status.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from tests import ROOT

from .gates import GATES
from .outcome import KNOWN, Outcome, differences, last, read, table


def run(gate: str, backend: str, world: int, tests: set[str] | None, timeout_s: int, folder: Path) -> Path:
    """One process of world.py, with a log beside its results; raises if it did not get to its end."""
    stem = folder / f"{gate}-{backend}-{world}"
    command = [sys.executable, "-m", "tests.torch_suite.suite", "--gate", gate, "--backend", backend]
    command += ["--world", str(world), "--timeout", str(timeout_s), "--out", f"{stem}.json"]
    if tests is not None:
        stem.with_suffix(".txt").write_text("\n".join(sorted(tests)), encoding="utf-8")
        command += ["--tests", f"{stem}.txt"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with open(f"{stem}.log", "w", encoding="utf-8") as log:
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        subprocess.run(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, check=True)
    print(f"gate {gate}, {backend}, world {world}: done", flush=True)
    return Path(f"{stem}.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", default="gloo")
    parser.add_argument("--backend", default="commlayer")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--gates", nargs="+", default=list(GATES), choices=GATES)
    parser.add_argument("--tests", type=Path, help="a file of names of tests, one a line; the default is all of them")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for a test; then it has failed")
    parser.add_argument("--jobs", type=int, default=2, help="how many worlds to run side by side")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "torch_suite", help="a folder")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    backends = [args.reference, args.backend]
    outcomes: list[Outcome] = []
    chosen = set(args.tests.read_text(encoding="utf-8").split()) if args.tests else None
    left = dict.fromkeys(args.worlds, chosen)
    for gate in args.gates:
        with ThreadPoolExecutor(args.jobs) as pool:
            runs = [
                pool.submit(run, gate, backend, world, left[world], args.timeout, args.out)
                for world, backend in product(args.worlds, backends)
                if left[world] != set()
            ]
            outcomes += read(future.result() for future in runs)
        skipped = [outcome for outcome in last(outcomes, args.reference).values() if outcome.outcome == "skipped"]
        left = {world: {outcome.test for outcome in skipped if outcome.world == world} for world in args.worlds}

    print("\n" + table(outcomes, backends) + "\n")
    failures = 0
    for difference in differences(outcomes, *backends):
        failures += difference.is_failure
        reason = KNOWN.get(difference.test) or (difference.detail.strip().splitlines() or [""])[-1][:200]
        mark = "DIFFERS" if difference.is_failure else "note   "
        print(
            f"{mark} world {difference.world} {difference.test}: {args.reference} {difference.reference}, "
            f"{args.backend} {difference.ours}. {reason}"
        )
    print(f"{failures} tests pass with {args.reference} and not with {args.backend}; details in {args.out}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
