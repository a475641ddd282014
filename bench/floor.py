"""The engine thread beside its floor: one thread that sends, receives and adds the same packets without a protocol.

    make build/test/speed/floor build/test/speed/loopback
    python -m bench.floor                   10 rounds (two minutes); writes docs/speed.md
    python -m bench.floor --only 9000       packets for an MTU of 9,000 alone
    python -m bench.floor --other TREE      beside the engine of another checkout, built there; keeps nothing

All run over loopback UDP, with packets for an MTU of 1,500 and of 9,000, and take turns: the floor, the engine between
four ranks, and two floors at once, as two threads without anything in common. The figure is Gbit/s of payload each way
per second of one thread's processor time: other load disturbs it less than the clock. The floor is
native/speed/floor.c, the engine native/speed/loopback.c; native/speed/core.c has the cost of a packet by the number of
peers, without sockets.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.harness.driver import BenchError, Benchmark, Content
from bench.harness.matrix import ROOT
from bench.harness.options import options
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from commlayer.tools.bench import machine

CASES = {1500: ("32", "1472"), 9000: ("7", "8972")}
"""The packets of a super-packet, and the bytes of a datagram, by MTU."""

SECONDS = "1"
REACH = 0.5
"""The share of the floor that the engine should reach."""

RESULTS = ROOT / "bench/results/floor.json"
PAGE = ROOT / "docs/speed.md"

Round = dict[str, float]


def gbps(tree: Path, program: str, *arguments: str, at_once: int = 1) -> float:
    """Gbit/s each way per second of processor time of a program, or of several at once: the sum. Raises BenchError."""
    path = tree / "build/test/speed" / program
    if not path.exists():
        raise BenchError(f"{path} is not there: run `make build/test/speed/{program}` in {tree}")
    runs = [subprocess.Popen([path, *arguments], stdout=subprocess.PIPE, text=True) for _ in range(at_once)]
    texts = [run.communicate()[0] for run in runs]
    found = [re.search(r"([0-9.]+) Gbit/s each way per second of CPU", text) for text in texts]
    if any(run.returncode for run in runs) or None in found:
        raise BenchError(f"{path} says {texts!r}: no Gbit/s per second of CPU in it")
    return sum(float(match[1]) for match in found if match is not None)


def measure(mtu: int, trees: Mapping[str, Path]) -> Round:
    """One round: the floor, the engine of each tree, and two floors, in turns."""
    segments, size = CASES[mtu]
    figures = {"floor": gbps(ROOT, "floor", segments, size, SECONDS)}
    figures |= {name: gbps(tree, "loopback", size, SECONDS) for name, tree in trees.items()}
    return figures | {"two floors": gbps(ROOT, "floor", segments, size, SECONDS, at_once=2)}


def ratios(rounds: Iterable[Round], above: str, below: str) -> list[float]:
    """A figure over another one of the same round."""
    return [figures[above] / figures[below] for figures in rounds]


def spread(values: list[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(content: Mapping[str, Any]) -> str:
    """A row for each MTU, as Markdown."""
    columns = ["MTU", "floor, Gbit/s", "engine, Gbit/s", "engine / floor", "two floors / one"]
    lines = []
    for mtu, case in content["cases"].items():
        rounds = case["rounds"]
        floor, engine = (statistics.median(figures[name] for figures in rounds) for name in ("floor", "engine"))
        lines.append([mtu, f"{floor:.1f}", f"{engine:.1f}", spread(ratios(rounds, "engine", "floor"))])
        lines[-1].append(spread(ratios(rounds, "two floors", "floor")))
        if "other engine" in rounds[0]:
            lines[-1][2] += f", {spread(ratios(rounds, 'engine', 'other engine'))} times the other one"
    last = content["cases"][max(content["cases"], key=int)]
    counts = " and ".join(str(len(case["rounds"])) for case in content["cases"].values())
    return f"{markdown(columns, lines)}\n\nMedian of {counts} rounds (range). {measured_on(last, 'floor')}"


def reaches(content: Mapping[str, Any]) -> bool:
    """Whether the engine has its share of the floor at every MTU."""
    shares = [ratios(case["rounds"], "engine", "floor") for case in content["cases"].values()]
    return all(statistics.median(share) >= REACH for share in shares)


BENCHMARK = Benchmark(
    RESULTS, PAGE, lambda content: {"floor": table(content)}, {"schema": 1, "cases": {}}, is_good=reaches
)


def main() -> int:
    """0; 1 if the engine misses its share, 2 if a program is not there."""
    parser = options(__doc__, only=CASES, rounds=10, table=True)
    parser.add_argument("--other", type=Path, help="another checkout")
    asked = parser.parse_args()
    trees = {"engine": ROOT} | ({} if asked.other is None else {"other engine": asked.other})
    asked.quick = asked.other is not None

    def add(content: Content, mtu: int) -> None:
        about = machine.facts()
        rounds = [measure(mtu, trees) for _ in range(asked.rounds)]
        content["cases"][str(mtu)] = {"rounds": rounds, "machine": about, "measured": today()}

    return BENCHMARK.main(asked, asked.only or CASES, add)


if __name__ == "__main__":
    sys.exit(main())
