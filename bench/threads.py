"""COMMLAYER_THREADS=2 beside 1: an all-reduce of two ranks over loopback UDP, as if four cores carried it.

    python -m bench.threads                10 rounds (three minutes); writes docs/speed.md
    python -m bench.threads --only full    without quotas: what a second thread costs where cores are few

Four cores are emulated on fewer by quotas of processor time (cgroup v1, as root): each core is a group of threads that
may run for QUOTA of each period. One has a rank's training thread and its first engine's, which take turns; the other
has its second engine's. With one thread the second core is idle. Each round runs one and two threads, in new
processes; every other round begins with two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.harness.driver import BenchError, Benchmark, Content
from bench.harness.matrix import ROOT
from bench.harness.options import options
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from commlayer.tools.bench import machine

SIZES = {"1 MiB": 1 << 20, "4 MiB": 4 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
LONGEST = "64 MiB"
"""The size for which the target holds."""

MEASURED_S = 1.5
"""How long each size is repeated."""

CASES = {"cores": 0.4, "full": 0.0}
"""The share of a core that each group may use; 0: no quota, as on this machine's own cores."""

PERIOD_US = 8000
REACH = 1.8
"""Two threads should be so many times as fast, where there are four cores."""

GROUPS = Path("/sys/fs/cgroup/cpu")
RESULTS = ROOT / "bench/results/threads.json"
PAGE = ROOT / "docs/speed.md"

Round = dict[str, dict[str, dict[str, float]]]
"""By number of threads and size: `seconds` of an all-reduce, and processor `cpu_s` of rank 0's threads for it."""


def place(quota: float, rank: int, folder: Path) -> None:
    """Gives this process's threads their two cores."""
    threads = {int(task.name): (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    engines = sorted(number for number, name in threads.items() if name == "commlayer")
    for core, members in ((0, threads.keys() - set(engines[1:])), (1, engines[1:])):
        group = folder / f"{rank}-{core}"
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(quota * PERIOD_US)))
        for number in members:
            (group / "tasks").write_text(str(number))


def run_rank(rank: int, port: int, quota: float, folder: Path) -> dict[str, dict[str, float]]:
    """One of two ranks: the seconds of an all-reduce, and the processor time of this rank for it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("commlayer", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if quota:
        place(quota, rank, folder)
    found = {}
    for name, nbytes in SIZES.items():
        tensor = torch.ones(nbytes // 4)
        count = torch.zeros(1, dtype=torch.int64)
        for _ in range(5):
            dist.all_reduce(tensor.fill_(1.0))
        begin_s = time.monotonic()
        for _ in range(5):
            dist.all_reduce(tensor.fill_(1.0))
        if rank == 0:
            count.fill_(max(5, int(5 * MEASURED_S / (time.monotonic() - begin_s))))
        dist.broadcast(count, 0)
        dist.barrier()
        begin_s, cpu_s, passed = time.monotonic(), time.process_time(), int(count)
        for _ in range(passed):
            dist.all_reduce(tensor)
        found[name] = {
            "seconds": (time.monotonic() - begin_s) / passed,
            "cpu_s": (time.process_time() - cpu_s) / passed,
        }
    dist.barrier()
    dist.destroy_process_group()
    return found


@contextlib.contextmanager
def groups(quota: float) -> Iterator[Path]:
    """A folder for groups of threads, which is gone afterwards. Raises BenchError if there are none."""
    folder = GROUPS / f"commlayer-threads-{os.getpid()}"
    if not quota:
        yield folder
        return
    if not (GROUPS / "cpu.cfs_quota_us").exists() and not (GROUPS / "tasks").exists():
        raise BenchError(f"{GROUPS} is no cgroup v1 of processors; run `--only full` on a machine with four cores")
    folder.mkdir()
    try:
        yield folder
    finally:
        for group in [*folder.glob("*-*"), folder]:
            group.rmdir()


def measure(threads: int, quota: float) -> dict[str, dict[str, float]]:
    """Runs two ranks; returns the figures of rank 0. Raises BenchError if one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = os.environ | {"COMMLAYER_THREADS": str(threads), "COMMLAYER_SHM": "0"}
    with groups(quota) as folder:
        command = [sys.executable, "-m", "bench.threads", "--port", str(port), "--quota", str(quota)]
        runs = [
            subprocess.Popen(
                [*command, "--folder", str(folder), "--rank", str(rank)],
                cwd=ROOT,
                env=environ,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        texts = [run.communicate()[0] for run in runs]
    if any(run.returncode for run in runs):
        raise BenchError(f"a rank of COMMLAYER_THREADS={threads} ended with {[run.returncode for run in runs]}")
    found: dict[str, dict[str, float]] = json.loads(texts[0])
    return found


def ratios(rounds: list[Round], size: str, figure: str) -> list[float]:
    """A figure with one thread over that with two, of the same round."""
    return [figures["1"][size][figure] / figures["2"][size][figure] for figures in rounds]


def spread(values: list[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(content: Mapping[str, Any]) -> str:
    """A row for each case and size, as Markdown."""
    columns = ["cores", "all-reduce", "one thread, ms", "two threads, ms", "speed, ratio", "processor time, ratio"]
    lines = []
    for name, case in content["cases"].items():
        quota, rounds = CASES[name], case["rounds"]
        cores = f"four, of {quota:.0%} each" if quota else f"{case['machine']['cores']}"
        for size in SIZES:
            times = [1e3 * statistics.median(f[n][size]["seconds"] for f in rounds) for n in ("1", "2")]
            cpu = [1 / ratio for ratio in ratios(rounds, size, "cpu_s")]
            lines.append([cores, size, *(f"{spent:.2f}" for spent in times)])
            lines[-1] += [spread(ratios(rounds, size, "seconds")), spread(cpu)]
    counts = " and ".join(str(len(case["rounds"])) for case in content["cases"].values())
    last = next(reversed(content["cases"].values()))
    return f"{markdown(columns, lines)}\n\nMedian of {counts} rounds (range). {measured_on(last, 'threads')}"


def reaches(content: Mapping[str, Any]) -> bool:
    """Whether two threads on four cores are as fast as they should be."""
    case = content["cases"].get("cores")
    return case is None or statistics.median(ratios(case["rounds"], LONGEST, "seconds")) >= REACH


BENCHMARK = Benchmark(
    RESULTS, PAGE, lambda content: {"threads": table(content)}, {"schema": 1, "cases": {}}, is_good=reaches
)


def main() -> int:
    """0; 1 if two threads gain less than they should, 2 if a run fails."""
    parser = options(__doc__, only=CASES, rounds=10, table=True)
    for name, kind in (("rank", int), ("port", int), ("quota", float), ("folder", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)  # of a rank that this program starts
    asked = parser.parse_args()
    if asked.rank is not None:
        print(json.dumps(run_rank(asked.rank, asked.port, asked.quota, asked.folder)))
        return 0

    def add(content: Content, name: str) -> None:
        about = machine.facts()
        rounds = [{n: measure(int(n), CASES[name]) for n in ("12", "21")[i % 2]} for i in range(asked.rounds)]
        content["cases"][name] = {"rounds": rounds, "machine": about, "measured": today()}

    return BENCHMARK.main(asked, asked.only or CASES, add)


if __name__ == "__main__":
    sys.exit(main())
