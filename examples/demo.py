"""Trains with train_gpt.py on gloo and on commlayer and compares them (`make demo`).

Each backend runs twice, in the order gloo, commlayer, commlayer, gloo, so that a machine that becomes slower or faster
favours neither. Writes out/demo.png (loss against wall time) and the metrics of every run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

ORDER = ("gloo", "commlayer", "commlayer", "gloo")
OUT = Path("out")


def run(backend: str, turn: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One training job; returns its metrics, a record per step and then the summary."""
    metrics = OUT / f"demo-{turn}-{backend}.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    script = [str(Path(__file__).with_name("train_gpt.py")), "--backend", backend, "--steps", str(options.steps)]
    subprocess.run(
        [*torchrun, *script, "--metrics", str(metrics)],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def table(runs: dict[str, list[list[dict[str, Any]]]], ranks: int) -> Table:
    """One row per backend; times are the mean of its runs' medians."""
    result = Table(title=f"byte-level GPT, {ranks} ranks, DDP")
    for heading in ("backend", "s/step", "tokens/s", "communication", "final loss", "replicas identical"):
        result.add_column(heading, justify="left" if heading == "backend" else "right")
    for backend, logs in runs.items():
        summaries = [log[-1] for log in logs]
        step_s = statistics.fmean(summary["step_s"] for summary in summaries)
        communication_s = statistics.fmean(summary["communication_s"] for summary in summaries)
        result.add_row(
            backend,
            f"{step_s:.4f}",
            f"{statistics.fmean(summary['tokens_per_s'] for summary in summaries):.0f}",
            f"{communication_s / step_s:.1%}",
            f"{summaries[0]['final_loss']:.4f}",
            "yes" if all(summary["replicas_identical"] for summary in summaries) else "NO",
        )
    return result


def plot(runs: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Loss against wall time of every run, as a running mean, because single batches are noisy."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for (backend, logs), colour in zip(runs.items(), ("tab:orange", "tab:blue"), strict=True):
        for turn, log in enumerate(logs):
            steps = log[:-1]
            window = max(1, len(steps) // 20)
            wall_s = [record["wall_s"] for record in steps[window - 1 :]]
            loss = [
                statistics.fmean(record["loss"] for record in steps[last - window : last])
                for last in range(window, len(steps) + 1)
            ]
            axes.plot(wall_s, loss, color=colour, alpha=0.8, label=backend if turn == 0 else None)
    axes.set(xlabel="training time (s)", ylabel="loss (nats per byte)", title="the same job on both backends")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps of each run (default: 800 / ranks, at most 400)")
    options = parser.parse_args()
    options.steps = options.steps or min(
        400, 800 // options.ranks
    )  # ranks share the cores: about the same time for any number of them

    OUT.mkdir(exist_ok=True)
    runs: dict[str, list[list[dict[str, Any]]]] = {"gloo": [], "commlayer": []}
    for turn, backend in enumerate(ORDER):
        runs[backend].append(run(backend, turn, options))

    pairs = zip(runs["gloo"][0][:-1], runs["commlayer"][0][:-1], strict=True)
    difference = max(abs(ours["loss"] - theirs["loss"]) for theirs, ours in pairs)
    plot(runs, OUT / "demo.png")
    console = Console()
    console.print(table(runs, options.ranks))
    console.print(f"largest difference between the loss curves: {difference:.2g}")
    console.print("communication: step time minus that of the same step under no_sync()")
    console.print(f"loss against wall time: {OUT / 'demo.png'}")
    if not all(log[-1]["replicas_identical"] for logs in runs.values() for log in logs):
        sys.exit("replicas differ: this is a bug")


if __name__ == "__main__":
    main()
