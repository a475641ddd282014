"""What the first milestone must show: runs the matrix, keeps it as JSON, writes the table of docs/results.md.

    python bench/first_light.py                          everything (about 8 minutes; the links need root)
    python bench/first_light.py --only loopback-2-large  one run, merged into the results that are there
    python bench/first_light.py --table                  only the table, from the results that are there

Every run is one `commlayer bench` command, kept in the JSON, so that each number can be measured again by itself.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commlayer.tools.bench.matrix import (
    LINK_SHARE,
    P50,
    P99,
    BenchError,
    Metric,
    best,
    keep,
    machines,
    measure,
    read_kept,
    verdict,
    write_between,
)
from commlayer.tools.bench.sizes import parse_size

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/first_light.json"
PAGE = ROOT / "docs/results.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

SHAPED = "--netns 4 --rate 200M --backends gloo,commlayer --tcp-cc cubic,bbr"
RUNS = {
    "loopback-2-small": "--ranks 2 --backends gloo,commlayer --sizes 4K --iters 500 --warmup 50",
    "loopback-2-large": "--ranks 2 --backends gloo,commlayer --sizes 1M,16M,64M --iters 20",
    "loopback-4-small": "--ranks 4 --backends gloo,commlayer --sizes 4K --iters 200 --warmup 20",
    "loopback-4-large": "--ranks 4 --backends gloo,commlayer --sizes 1M,16M --iters 20",
    "link-clean": f"{SHAPED} --sizes 8M --iters 6 --warmup 1",
    "link-lossy-large": f"{SHAPED} --loss 0.01 --sizes 8M --iters 6 --warmup 1",
    "link-lossy-small": f"{SHAPED} --loss 0.01 --sizes 4K --iters 200 --warmup 5",
}
ROUNDS = 5

BUSBW = Metric("busbw", lambda result: result["busbw_gb_s"], lambda gb_s: f"{gb_s:.3g} GB/s", True)
CPU = Metric("CPU", lambda result: result["cpu_process_s_per_gb"], lambda s: f"{s:.3g} s/GB")
MACHINE_CPU = Metric("CPU of the machine", lambda result: result["cpu_machine_s_per_gb"], lambda s: f"{s:.3g} s/GB")


@dataclass(frozen=True)
class Claim:
    """One row: a figure of one run, and what it has to be, as a ratio over gloo or as a value."""

    case: str
    run: str
    size: str
    metric: Metric
    min_ratio: float | None = None
    """How many times better than the best gloo: less of a time, more of a bandwidth."""
    bound: float | None = None
    """What the figure itself must reach, or stay under when less is better."""

    @property
    def target(self) -> str:
        parts = [] if self.min_ratio is None else [f"≥ {self.min_ratio:g}x"]
        if self.bound is not None:
            parts.append(f"{'≥' if self.metric.higher_is_better else '<'} {self.metric.text(self.bound)}")
        return ", ".join(parts)


LOOPBACK_2 = "loopback, 2 ranks"
LOOPBACK_4 = "loopback, 4 ranks"
CLEAN = "4 hosts, 200 Mbit/s, no loss"
LOSSY = "4 hosts, 200 Mbit/s, 1 % loss"
CLAIMS = (
    Claim(LOOPBACK_2, "loopback-2-small", "4K", P50, min_ratio=5),
    Claim(LOOPBACK_2, "loopback-2-large", "1M", BUSBW, min_ratio=3),
    Claim(LOOPBACK_2, "loopback-2-large", "16M", BUSBW, min_ratio=2.5),
    Claim(LOOPBACK_2, "loopback-2-large", "64M", BUSBW, min_ratio=2.5),
    Claim(LOOPBACK_4, "loopback-4-small", "4K", P50, min_ratio=4),
    Claim(LOOPBACK_4, "loopback-4-large", "1M", BUSBW, min_ratio=3),
    Claim(LOOPBACK_4, "loopback-4-large", "16M", BUSBW, min_ratio=2),
    Claim(CLEAN, "link-clean", "8M", LINK_SHARE, bound=0.95),
    Claim(CLEAN, "link-clean", "8M", CPU, min_ratio=1),
    Claim(CLEAN, "link-clean", "8M", MACHINE_CPU, min_ratio=1),
    Claim(LOSSY, "link-lossy-large", "8M", BUSBW, min_ratio=1.8),
    Claim(LOSSY, "link-lossy-small", "4K", P99, bound=25_000),
)


@dataclass(frozen=True)
class Row:
    """A claim with its figures."""

    claim: Claim
    commlayer: float
    gloo: float
    """The best of the gloo variants in this figure."""
    gloo_name: str
    wrong: int

    @property
    def ratio(self) -> float:
        """Above 1 commlayer is better."""
        return self.claim.metric.ratio(self.commlayer, self.gloo)

    @property
    def reached(self) -> bool:
        """Whether the claim holds. Never when a result was wrong."""
        claim = self.claim
        ratio_ok = claim.min_ratio is None or self.ratio >= claim.min_ratio
        if claim.bound is None:
            bound_ok = True
        elif claim.metric.higher_is_better:
            bound_ok = self.commlayer >= claim.bound
        else:
            bound_ok = self.commlayer < claim.bound
        return self.wrong == 0 and ratio_ok and bound_ok


def row_of(claim: Claim, runs: dict[str, Any]) -> Row | None:
    """The claim's figures out of the runs; None when its run has not been measured."""
    run = runs.get(claim.run)
    if run is None:
        return None
    results = [result for result in run["results"] if result["size_bytes"] == parse_size(claim.size)]
    figures = {result["backend"]: claim.metric.of(result) for result in results}
    gloo = {name: figure for name, figure in figures.items() if name.startswith("gloo")}
    if "commlayer" not in figures or not gloo:
        return None
    name = best(gloo, claim.metric)
    return Row(claim, figures["commlayer"], gloo[name], name, sum(result["wrong"] for result in results))


def table(runs: dict[str, Any]) -> str:
    """The table of docs/results.md: nothing in it comes from anywhere but the results and the targets."""
    lines = [
        "| all-reduce | size | figure | commlayer | best gloo | ratio | target | reached |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        row = row_of(claim, runs)
        start = f"| {claim.case} | {claim.size}iB | {claim.metric.name} |"
        if row is None:
            lines.append(f"{start} not measured | | | {claim.target} | |")
            continue
        text = claim.metric.text
        figures = f"{text(row.commlayer)} | {text(row.gloo)} ({row.gloo_name}) | {row.ratio:.2f}x"
        lines.append(f"{start} {figures} | {claim.target} | {verdict(row.reached)} |")
    return "\n".join([*lines, "", *_conditions(runs)])


def _conditions(runs: dict[str, Any]) -> list[str]:
    if not runs:
        return ["Nothing has been measured yet: `python bench/first_light.py`."]
    links = [run["link"] for run in runs.values() if run["link"] is not None]
    lines = [f"Measured on {machines(runs.values())}. Medians of {ROUNDS} rounds in which the backends take turns."]
    if links:
        lines.append(
            f"Hosts are network namespaces, segmentation offloads off, {links[0]['buffer_packets']} packets of buffer "
            f"per switch port; gloo runs with TCP cubic and with bbr and the better one counts. The link's rate is "
            f"{links[0]['payload_gb_s'] * 1e3:.2f} MB/s of UDP payload."
        )
    lines.append(
        "Generated by `bench/first_light.py` from `bench/results/first_light.json`, which has the commands and the "
        "figures of each round."
    )
    return lines


def write_page(runs: dict[str, Any], page: Path) -> bool:
    """Replaces the text between the markers. False when the page does not have them."""
    return write_between(page, BEGIN, END, table(runs))


def main() -> int:
    """0 when every claim measured so far holds, 1 when one does not, 2 when a run could not be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(RUNS), help="measure this run (may be repeated)")
    parser.add_argument("--table", action="store_true", help="measure nothing, only write the table")
    arguments = parser.parse_args()

    kept = read_kept(RESULTS)
    runs = kept["runs"]
    failures = []
    for name in [] if arguments.table else arguments.only or list(RUNS):
        try:
            runs[name] = measure(name, f"all_reduce {RUNS[name]} --rounds {ROUNDS}", ROOT)
        except BenchError as error:
            failures.append(str(error))
            continue
        keep(RESULTS, kept)
    print(table(runs))
    if not write_page(runs, PAGE):
        print(f"{PAGE.name} has no {BEGIN} and {END}: table not written there", file=sys.stderr)
    for failure in failures:
        print(failure, file=sys.stderr)
    if failures:
        return 2
    rows = [row_of(claim, runs) for claim in CLAIMS]
    return 0 if all(row.reached for row in rows if row is not None) else 1


if __name__ == "__main__":
    sys.exit(main())
