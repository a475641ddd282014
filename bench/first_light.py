"""All-reduce on one host and on slow links, beside gloo: measures the runs and writes the table of docs/results.md.

    python -m bench.first_light                          everything (about 8 minutes; the links need root)
    python -m bench.first_light --only loopback-2-large  one run, merged into the kept results
    python -m bench.first_light --table                  only the table of the kept results

Every run is one `commlayer bench` command, kept in the JSON, so that each number can be measured again by itself.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.harness.matrix import (
    LINK_SHARE,
    P50,
    P99,
    ROOT,
    Claim,
    Figures,
    Matrix,
    Metric,
    Runs,
    best,
    machines,
    measure,
)
from commlayer.tools.bench.sizes import parse_size

SHAPED = "--netns 4 --rate 200M --backends gloo,commlayer --tcp-cc cubic,bbr"
RUNS = {
    "loopback-2-small": "--ranks 2 --backends gloo,commlayer --sizes 4K --iters 500 --warmup 50",
    "loopback-2-large": "--ranks 2 --backends gloo,commlayer --sizes 1M,16M,64M --iters 20",
    "loopback-4-small": "--ranks 4 --backends gloo,commlayer --sizes 4K --iters 200 --warmup 20",
    "loopback-4-large": "--ranks 4 --backends gloo,commlayer --sizes 1M,16M --iters 20",
    "link-clean": f"{SHAPED} --sizes 8M --iters 6 --warmup 1",
    "link-fast": f"{SHAPED.replace('200M', '1G --offloads')} --sizes 8M --iters 10 --warmup 2",
    "link-lossy-large": f"{SHAPED} --loss 0.01 --sizes 8M --iters 6 --warmup 1",
    "link-lossy-small": f"{SHAPED} --loss 0.01 --sizes 4K --iters 200 --warmup 5",
}
ROUNDS = 5

BUSBW = Metric("busbw", lambda result: result["busbw_gb_s"], lambda gb_s: f"{gb_s:.3g} GB/s", True)
CPU = Metric("CPU", lambda result: result["cpu_process_s_per_gb"], lambda s: f"{s:.3g} s/GB")
MACHINE_CPU = Metric("CPU of the machine", lambda result: result["cpu_machine_s_per_gb"], lambda s: f"{s:.3g} s/GB")


def claim(
    case: str, run: str, size: str, metric: Metric, *, ratio: float | None = None, figure: float | None = None
) -> Claim:
    """`ratio`: how many times better than the best gloo; `figure`: the value to reach, or to stay under if less is
    better."""
    sign = "≥" if metric.higher_is_better else "<"
    targets = [] if ratio is None else [f"≥ {ratio:g}x"]
    targets += [] if figure is None else [f"{sign} {metric.text(figure)}"]

    def outcome(runs: Runs) -> Figures:
        results = [result for result in runs[run]["results"] if result["size_bytes"] == parse_size(size)]
        figures = {result["backend"]: metric.of(result) for result in results}
        gloo = {name: measured for name, measured in figures.items() if name.startswith("gloo")}
        name, ours = best(gloo, metric), figures["commlayer"]
        over_gloo = metric.ratio(ours, gloo[name])
        good = all(result["wrong"] == 0 for result in results) and (ratio is None or over_gloo >= ratio)
        if figure is not None:
            good = good and (ours >= figure if metric.higher_is_better else ours < figure)
        return Figures(metric.text(ours), f"{metric.text(gloo[name])} ({name})", over_gloo, good)

    return Claim(run, case, f"{size}iB", metric.name, ", ".join(targets), outcome)


LOOPBACK_2 = "loopback, 2 ranks"
LOOPBACK_4 = "loopback, 4 ranks"
CLEAN = "4 hosts, 200 Mbit/s, no loss"
FAST = "4 hosts, 1 Gbit/s, no loss, segmentation offloads"
LOSSY = "4 hosts, 200 Mbit/s, 1 % loss"
CLAIMS = (
    claim(LOOPBACK_2, "loopback-2-small", "4K", P50, ratio=5),
    claim(LOOPBACK_2, "loopback-2-large", "1M", BUSBW, ratio=3),
    claim(LOOPBACK_2, "loopback-2-large", "16M", BUSBW, ratio=2.5),
    claim(LOOPBACK_2, "loopback-2-large", "64M", BUSBW, ratio=2.5),
    claim(LOOPBACK_4, "loopback-4-small", "4K", P50, ratio=4),
    claim(LOOPBACK_4, "loopback-4-large", "1M", BUSBW, ratio=3),
    claim(LOOPBACK_4, "loopback-4-large", "16M", BUSBW, ratio=2),
    claim(CLEAN, "link-clean", "8M", LINK_SHARE, figure=0.95),
    claim(CLEAN, "link-clean", "8M", CPU, ratio=1),
    claim(CLEAN, "link-clean", "8M", MACHINE_CPU, ratio=1),
    claim(FAST, "link-fast", "8M", BUSBW, ratio=1),
    claim(FAST, "link-fast", "8M", CPU, ratio=1),
    claim(FAST, "link-fast", "8M", MACHINE_CPU, ratio=1),
    claim(LOSSY, "link-lossy-large", "8M", BUSBW, ratio=1.8),
    claim(LOSSY, "link-lossy-small", "4K", P99, figure=25_000),
)


def table(runs: Runs) -> str:
    """The table of docs/results.md: it has nothing but the results and the targets."""
    lines = [
        "| all-reduce | size | figure | commlayer | best gloo | ratio | target | reached |",
        "|---|---|---|---|---|---|---|---|",
        *(stated.row(runs) for stated in CLAIMS),
        "",
    ]
    if not runs:
        return "\n".join([*lines, "Nothing has been measured yet: `python -m bench.first_light`."])
    lines.append(f"Measured on {machines(runs)}. Medians of {ROUNDS} rounds in which the backends take turns.")
    link = next((run["link"] for name, run in runs.items() if name != "link-fast" and run.get("link")), None)
    if link is not None:
        lines.append(
            f"Hosts are network namespaces, segmentation offloads off but where the table names them, "
            f"{link['buffer_packets']} packets of buffer per switch port; gloo runs with TCP cubic and with bbr and "
            f"the better one counts. The rate of a link of 200 Mbit/s is {link['payload_gb_s'] * 1e3:.2f} MB/s of UDP "
            f"payload."
        )
    lines.append(
        "Generated by `bench/first_light.py` from `bench/results/first_light.json`, which has the commands and the "
        "figures of each round."
    )
    return "\n".join(lines)


def run(name: str, quick: bool) -> dict[str, Any]:
    """Measures one of RUNS. Raises BenchError."""
    return measure(name, f"all_reduce {RUNS[name]} --rounds {1 if quick else ROUNDS}")


MATRIX = Matrix(
    RUNS, run, CLAIMS, {"results": table}, ROOT / "bench/results/first_light.json", ROOT / "docs/results.md"
)

if __name__ == "__main__":
    sys.exit(MATRIX.main(__doc__))
