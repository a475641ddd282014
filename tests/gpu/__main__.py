"""Checks CUDA tensors on the GPUs of this machine, in 10 minutes: one GPU is enough, for two ranks. No network.

    make gpu                                  # or, where commlayer is installed: python -m tests.gpu
    python -m tests.gpu --only drains --only fsdp

It prints a row for each fact, check and figure, and writes them to gpu-report.json. Each runs in processes of its own;
those of one that does not end print all their stacks. Exit status 0: all checks passed; 1: some failed; 2: there is no
GPU, or no torch that can use it, and nothing was checked.
"""

import argparse
import importlib.metadata
import json
import logging
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests import ranks
from tests.gpu.checks import CHECKS, ON_GPUS, UNTIDY, Check, graph_beside
from tests.gpu.facts import CALLS, PROGRESS, fact
from tests.gpu.figures import BESIDE_GLOO, FIGURES
from tests.gpu.lab import Gpu, waits

LIMIT_S = 600.0
CHECK_S = 60.0
FACT_S = 20.0
STREAMS = {"COMMLAYER_STREAM_WAIT": "1"}
MODES: dict[str, dict[str, str]] = {
    "blocking": {},
    "streams": STREAMS,
    "one queue": {**STREAMS, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}
ALL: dict[str, Check] = {**CHECKS, **ON_GPUS, **UNTIDY, "graph_beside": graph_beside}
DRAINS_AGAIN = ("drains", "messages", "many_in_flight")
"""The checks that run with one queue for all streams, and with CUDA_LAUNCH_BLOCKING=1."""


def check(rank: int, size: int, name: str) -> bool:
    """The body of a rank; returns whether streams wait for operations."""
    logging.basicConfig(level=logging.WARNING)
    lab = Gpu(rank)
    bound = {"device_id": lab.device} if name == "collectives" else {}
    ranks.init(rank, size, "cpu:commlayer,cuda:commlayer" if bound else "commlayer", **bound)
    ALL[name](lab, rank, size)
    waited = waits(lab)
    if name not in UNTIDY:
        torch.distributed.destroy_process_group()
    return waited


def figure(rank: int, size: int, name: str) -> dict[str, float]:
    """The body of a rank; returns its figures."""
    Gpu(rank)
    return FIGURES[name](rank, size)


def one_fact(rank: int, size: int, call: str, progress: str) -> dict[str, float]:
    """The body of the only process of a fact."""
    return fact(call, progress)


class Report:
    """The rows, as a table and as gpu-report.json."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path = path
        self._begun_s = time.monotonic()
        self._limit_s = limit_s
        self.failed = 0
        self._rows: list[dict[str, Any]] = []
        self._about = about()

    def run(self, part: str, name: str, mode: str, body: Callable[[], Any]) -> None:
        """Runs one, if there is time, and notes its result or its error."""
        row: dict[str, Any] = {"part": part, "name": name, "mode": mode}
        begun_s = time.monotonic()
        if begun_s - self._begun_s > self._limit_s:
            row["result"] = "not run: the time was up"
        else:
            try:
                row["values"] = body()
                row["result"] = "ok"
            except ranks.RanksError as error:
                row["result"], row["error"] = "FAILED", str(error)
                self.failed += part == "check"
        row["seconds"] = round(time.monotonic() - begun_s, 1)
        self._rows.append(row)
        shown = row.get("error") or row.get("values") or ""
        print(f"{part:6} {mode:16} {name:24} {row['seconds']:6.1f} s  {row['result']}  {shown}", flush=True)
        self._path.write_text(json.dumps({**self._about, "rows": self._rows}, indent=1) + "\n")


def about() -> dict[str, str]:
    """The machine and its software."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        driver = "unknown: there is no nvidia-smi"
    return {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "driver": driver,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "python": platform.python_version(),
        "commlayer": importlib.metadata.version("commlayer"),
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def run_check(name: str, environ: dict[str, str]) -> str:
    """Runs a check on two ranks; says whether streams waited. Raises RanksError."""
    ended = ranks.outcomes(check, 2, name, environ=environ, timeout_s=CHECK_S)
    if name == "killed" and ended[1].exit_code == -signal.SIGKILL:
        ended[1].error = None
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(ended) if outcome.error]
    if errors:
        raise ranks.RanksError("\n".join(errors))
    return "streams wait" if ended[0].result else "wait() blocks"


def jobs() -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    """Part, name, mode and body of all that is run: the most important first, as the time may be up."""
    for mode, environ in MODES.items():
        for name in DRAINS_AGAIN if mode == "one queue" else ALL:
            yield "check", name, mode, partial(run_check, name, environ)
    for name in DRAINS_AGAIN:
        yield "check", name, "launch blocking", partial(run_check, name, {**STREAMS, "CUDA_LAUNCH_BLOCKING": "1"})
    for name in FIGURES:
        for backend in ("commlayer", "gloo") if name in BESIDE_GLOO else ("commlayer",):
            yield "figure", name, backend, partial(ranks.run_job, figure, 2, name, backend=backend, timeout_s=CHECK_S)
    for progress in PROGRESS:
        for call in CALLS:
            yield "fact", call, progress, partial(ranks.run, one_fact, 1, call, progress, timeout_s=FACT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="of a check, figure or fact; may be repeated")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="what has not begun by then is not run")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no GPU, or none that torch {torch.__version__} can use: nothing was checked")
        return 2
    report = Report(options.report, options.limit_s)
    print(", ".join(f"{name} {value}" for name, value in report._about.items()))
    for part, name, mode, body in jobs():
        if not options.only or name in options.only:
            report.run(part, name, mode, body)
    print(f"{report.failed} checks failed" if report.failed else "all checks passed", f"({options.report})")
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
