"""DLCP beside DCTCP on a simulated leaf-spine fabric: bench/results/fabric.json and the tables of docs/fabric.md.

    make fabric                        everything: 144 hosts, several seeds; builds the two programs
    python -m bench.fabric --quick     24 hosts, one seed, in seconds; nothing is written
    python -m bench.fabric --table     only the tables of the kept results

Each run is one process (native/fabric/main.c) in virtual time: the figures are the same on every machine. The
transports get the same plans, messages and background; a seed changes the background and when the ranks call.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bench.harness.driver import BenchError, Benchmark, Content
from bench.harness.options import options
from bench.harness.page import markdown

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "build/test/fabric/simulate"
PLANS = ROOT / "build/fabric.bin"
RESULTS = ROOT / "bench/results/fabric.json"
PAGE = ROOT / "docs/fabric.md"

LOAD = 0.4
"""Background traffic, as a share of every link to a host of the job."""

LIMIT_MS = 60
"""Limit of virtual time; longer runs count as unfinished. Background traffic takes most of the work."""

CREDIT_KIB = 256
"""What a port grants. 1.5 times what a link carries in a round trip of the empty fabric are 176 KiB. Beside other
traffic packets wait, and 256 KiB do better: see docs/fabric.md."""

TRANSPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dctcp": ("DCTCP", {"transport": "dctcp"}),
    "bounded": ("DLCP, loss bound 10 %", {"loss_bound": 0.1}),
    "reliable": ("DLCP, reliable", {}),
    "credit": ("DLCP, reliable, credit", {"credit_kib": CREDIT_KIB, "priorities": 0}),
    "ecmp": ("DLCP, reliable, no spraying", {"sprays": 0}),
    "shipped": ("DLCP, loss bound 10 %, timers as shipped", {"loss_bound": 0.1, "tick_ns": 1000}),
    "flat": ("DLCP, loss bound 10 %, one class in switches", {"loss_bound": 0.1, "priorities": 0}),
    "patient": ("DCTCP, RTO of 10 ms", {"transport": "dctcp", "rto_us": 10_000}),
    "linux": ("DCTCP, RTO of 200 ms", {"transport": "dctcp", "rto_us": 200_000}),
}
"""The transports: name in the tables, and options."""


@dataclass(frozen=True)
class Case:
    """One workload on one fabric, and the transports measured there; the others are compared to the first."""

    what: str
    shapes: str
    options: dict[str, float]
    transports: tuple[str, ...]


DIRECT, RING, STEP, SERVERS = "2", "5", "0,1,2", "6"
ALONE, TIMEOUTS = "8 servers, 1 MiB, no other traffic", ("dctcp", "bounded", "reliable", "credit", "patient", "linux")
QUIET: dict[str, float] = {"load": 0, "limit_ms": 20_000}
"""Virtual time in which nothing happens costs nothing: timeouts of DCTCP may take as long as they like."""
AT_ONCE, APART = "three buckets at once, 21 MiB", "three buckets, 200 us apart, 21 MiB"
CASES = {
    "direct": Case("all-to-owner, 12 MiB", DIRECT, {}, ("dctcp", "bounded", "reliable", "credit", "ecmp", "shipped")),
    "shallow": Case(
        "all-to-owner, 12 MiB, 256 KiB per port",
        DIRECT,
        {"port_kib": 256},
        ("dctcp", "bounded", "reliable", "linux"),
    ),
    "ring": Case("ring, 12 MiB", RING, {}, ("dctcp", "reliable")),
    "step": Case(AT_ONCE, STEP, {}, ("dctcp", "bounded", "flat", "credit")),
    "apart": Case(APART, STEP, {"gap_us": 200}, ("dctcp", "bounded", "flat")),
    "servers": Case("8 servers, 1 MiB", SERVERS, {}, ("dctcp", "bounded", "reliable", "credit")),
    "servers_shallow": Case(
        "8 servers, 1 MiB, 256 KiB per port", SERVERS, {"port_kib": 256}, ("dctcp", "bounded", "reliable", "credit")
    ),
    "alone": Case(ALONE, SERVERS, QUIET, TIMEOUTS),
    "alone_shallow": Case(f"{ALONE}, 256 KiB per port", SERVERS, QUIET | {"port_kib": 256}, TIMEOUTS),
}
QUICK_SHAPES = {DIRECT: "9", RING: "12", STEP: "7,8,9", SERVERS: "13"}
QUICK = {"leaves": 3, "hosts_per_leaf": 8, "others_per_leaf": 8}

Result = dict[str, Any]
"""The program's output; {"unfinished": reason} if it did not end within its limit of virtual time."""

Cases = dict[str, dict[str, list[Result]]]
"""Results by case and transport, one per seed."""


def command(case: Case, transport: str, seed: int, quick: bool, tree: Path = ROOT) -> list[str]:
    """One run of the program, with the plans, that were built in `tree`."""
    program, plans = (tree / path.relative_to(ROOT) for path in (PROGRAM, PLANS))
    shapes = QUICK_SHAPES[case.shapes] if quick else case.shapes
    options: dict[str, Any] = {"plans": plans, "shapes": shapes, "load": LOAD, "seed": seed, "limit_ms": LIMIT_MS}
    options |= (QUICK if quick else {}) | case.options | TRANSPORTS[transport][1]
    return [str(program), *(text for name, value in options.items() for text in (f"--{name}", str(value)))]


def run(case: Case, transport: str, seed: int, quick: bool, tree: Path = ROOT) -> Result:
    """One run. Raises BenchError if the program fails."""
    done = subprocess.run(command(case, transport, seed, quick, tree), capture_output=True, text=True)
    if done.returncode == 1:
        return {"unfinished": done.stderr.strip()}
    if done.returncode != 0:
        raise BenchError(f"fabric: {case.what}, {transport}, seed {seed}: {done.stderr.strip()}")
    result: Result = json.loads(done.stdout)
    return result


def change(value: float, base: float) -> str:
    """The difference from `base` in percent."""
    return f"{100 * (value / base - 1):+.1f} %"


FIGURES = [(what, figure) for what in ("messages", "collectives") for figure in ("mean_us", "p99_us")]
HEAD = (
    "| workload | transport | seeds | message mean, us | vs DCTCP | message p99, us | vs DCTCP | all-reduce mean, us "
    "| vs DCTCP | all-reduce p99, us | vs DCTCP | not delivered |\n" + "|---" * 12 + "|"
)
PAPER = "| *the paper's, flows* | *DLCP vs DCTCP* | | | *-43.1 %* | | *-91.8 %* | | | | | |"


def rows(case: Case, results: dict[str, list[Result]]) -> list[str]:
    """The table's rows of one workload: means over the seeds."""
    lines = []
    base: dict[tuple[str, str], float] = {}
    for transport in case.transports:
        seeds = results.get(transport, [])
        cells = [case.what, TRANSPORTS[transport][0], str(len(seeds))]
        unfinished = [seed["unfinished"] for seed in seeds if "unfinished" in seed]
        if unfinished or not seeds:
            cells += [*unfinished[:1], "not run"][:1] + [""] * 8
        else:
            values = {(what, figure): mean(seed[what][figure] for seed in seeds) for what, figure in FIGURES}
            for key, value in values.items():
                cells += [f"{value:.0f}", change(value, base[key]) if base else ""]
            cells.append(f"{100 * mean(seed['missing'] for seed in seeds):.2f} %")
            base = base or values
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def table(cases: Cases) -> str:
    """All workloads, with the paper's figures last."""
    return "\n".join([HEAD, *(line for name, case in CASES.items() for line in rows(case, cases.get(name, {}))), PAPER])


def urgent(cases: Cases) -> str:
    """Mean time of the bucket needed first, and of the whole step, for steps with several buckets."""
    names = ("workload", "transport", "seeds", "first bucket, us", "vs DCTCP", "whole step, us", "vs DCTCP")
    lines = []
    for name, case in CASES.items():
        base: tuple[float, float] | None = None
        for transport in case.transports if "," in case.shapes else ():
            seeds = [seed for seed in cases.get(name, {}).get(transport, []) if "unfinished" not in seed]
            if not seeds:
                continue
            values = mean(seed["urgent"]["mean_us"] for seed in seeds), mean(seed["round_us"] for seed in seeds)
            cells = [case.what, TRANSPORTS[transport][0], str(len(seeds))]
            for place, value in enumerate(values):
                cells += [f"{value:.0f}", change(value, base[place]) if base else ""]
            base = base or values
            lines.append(cells)
    return markdown(names, lines)


def counters(cases: Cases) -> str:
    """Packet counters, warm-up included, summed over the seeds."""
    names = ["workload", "transport", "packets", "marked", "dropped selectively", "dropped, no room", "sent again"]
    names += ["timeouts", "short background flows p99, us"]
    lines = []
    for name, case in CASES.items():
        for transport in case.transports:
            seeds = [seed for seed in cases.get(name, {}).get(transport, []) if "unfinished" not in seed]
            if not seeds:
                continue
            cells = [case.what, TRANSPORTS[transport][0]]
            cells += [str(sum(s[what] for s in seeds)) for what in ("packets", "marked", "selected", "overflowed")]
            cells.append(str(sum(seed["dlcp"]["again"] + seed["dctcp"]["again"] for seed in seeds)))
            cells.append(str(sum(seed["dctcp"]["timeouts"] for seed in seeds)))
            flows = [seed["background_short"]["p99_us"] for seed in seeds if seed["background_short"]["count"]]
            cells.append(f"{mean(flows):.0f}" if flows else "")
            lines.append(cells)
    return markdown(names, lines)


BENCHMARK = Benchmark(
    RESULTS, PAGE, lambda cases: {"fabric": "\n\n".join([table(cases), urgent(cases), counters(cases)])}
)


def main() -> int:
    """0, or 2 if the program has not been built, or fails."""
    parser = options(__doc__, only=CASES, seeds=3, quick="24 hosts, one seed", table=True)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at a time")
    asked = parser.parse_args()
    if not asked.table and not (PROGRAM.exists() and PLANS.exists()):
        build = "make build/test/fabric/simulate build/fabric.bin"
        print(f"{PROGRAM} or {PLANS} is missing: build them with `{build}`", file=sys.stderr)
        return 2
    seeds = range(1, 2 if asked.quick else asked.seeds + 1)

    def measure(content: Content, name: str) -> None:
        case, found = CASES[name], dict[str, list[Result]]()
        work = list(itertools.product(case.transports, seeds))
        with ThreadPoolExecutor(asked.jobs) as pool:
            done = pool.map(lambda one: run(case, one[0], one[1], asked.quick), work)
            for (transport, seed), result in zip(work, done, strict=True):
                found.setdefault(transport, []).append(result)
                ended = result.get("unfinished", "done")
                print(f"{name}, {transport}, seed {seed}: {ended}", file=sys.stderr, flush=True)
        content[name] = found

    return BENCHMARK.main(asked, asked.only or CASES, measure)


if __name__ == "__main__":
    sys.exit(main())
