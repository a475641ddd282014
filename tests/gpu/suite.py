"""Checks CUDA tensors on the GPUs of this machine, in 10 minutes: one GPU is enough, for two ranks. No network.

    make gpu                                  # or, where commlayer is installed: python -m tests.gpu
    python -m tests.gpu --only drains --only fsdp
    python -m tests.gpu --part check --mode streams --times 10

It prints a row for each fact, check and figure, and writes them to gpu-report.json. Each runs in processes of its own;
those of one that does not end print all their stacks. Exit status 0: all checks passed; 1: some failed; 2: there is no
GPU, or no torch that can use it, and nothing was checked.
"""

import argparse
import importlib.metadata
import itertools
import json
import logging
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from commlayer.config import Config
from tests import ranks
from tests.gpu.checks import CHECKS, ON_GPUS, UNTIDY, Check, graph_beside
from tests.gpu.facts import CALLS, PROGRESS, WAITS, fact
from tests.gpu.figures import BESIDE_GLOO, BY_MODE, FIGURES
from tests.gpu.lab import FakeGpu, Gpu, Lab, waits

LIMIT_S = 600.0
CHECK_S = 60.0
FACT_S = 20.0
MODES: dict[str, dict[str, str]] = {
    "blocking": {"COMMLAYER_STREAM_WAIT": "0"},
    "streams": {"COMMLAYER_STREAM_WAIT": "1"},
    "network": {"COMMLAYER_STREAM_WAIT": "1", **ranks.UDP},
}
"""The environment of jobs. With "network" the ranks share no memory, as if they were on two hosts."""
NARROW: dict[str, dict[str, str]] = {
    mode: {"COMMLAYER_STREAM_WAIT": "1", **more}
    for mode, more in {
        "one queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        "launch blocking": {"CUDA_LAUNCH_BLOCKING": "1"},
        "little memory": {"COMMLAYER_PINNED_BYTES": "1048576"},
    }.items()
}
"""More modes, in which only the checks of `IN_NARROW` run."""
ALL: dict[str, Check] = {**CHECKS, **ON_GPUS, **UNTIDY, "graph_beside": graph_beside}
WITH_DEVICE_ID = ("collectives", "beside_nccl")
"""The checks whose group is made with the argument `device_id`."""
IN_NARROW = ("drains", "messages", "many_in_flight", "programs")


def check(rank: int, size: int, name: str, on_fake: bool) -> bool:
    """The body of a rank; returns whether streams wait for operations."""
    logging.basicConfig(level=logging.WARNING)
    lab: Lab = FakeGpu(stream_wait=Config.from_environment().streams_wait()) if on_fake else Gpu(rank)
    bound = {"device_id": lab.device} if name in WITH_DEVICE_ID and not on_fake else {}
    ranks.init(rank, size, "cpu:commlayer,cuda:commlayer" if bound else "commlayer", **bound)
    lab.stage()
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
    has_gpu = torch.cuda.is_available()
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        driver = "unknown: there is no nvidia-smi"
    return {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if has_gpu else "a fake",
        "driver": driver,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "python": platform.python_version(),
        "commlayer": importlib.metadata.version("commlayer"),
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def run_check(name: str, environ: dict[str, str], on_fake: bool = False) -> str:
    """Runs a check on two ranks; says whether streams waited. Raises RanksError."""
    ended = ranks.outcomes(check, 2, name, on_fake, environ=environ, timeout_s=CHECK_S)
    if name == "killed" and ended[1].exit_code == -signal.SIGKILL:
        ended[1].error = None
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(ended) if outcome.error]
    if errors:
        raise ranks.RanksError("\n".join(errors))
    return "streams wait" if ended[0].result else "wait() blocks"


def jobs_on_fake() -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    """The same, on a fake of CUDA, which has neither figures nor facts."""
    for mode in ("blocking", "streams"):
        for name in CHECKS:
            yield "check", name, mode, partial(run_check, name, MODES[mode], True)


def jobs() -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    """Part, name, mode and body of all that is run: the most important first, as the time may be up."""
    for names, modes in ((ALL, MODES), (IN_NARROW, NARROW)):
        for mode, environ in modes.items():
            for name in names:
                yield "check", name, mode, partial(run_check, name, environ)
    for name in FIGURES:
        for mode in (*MODES, "gloo") if name in BESIDE_GLOO else MODES if name in BY_MODE else ("streams",):
            backend, environ = ("gloo", {}) if mode == "gloo" else ("commlayer", MODES[mode])
            body = partial(ranks.run_job, figure, 2, name, backend=backend, environ=environ, timeout_s=CHECK_S)
            yield "figure", name, mode, body
    for progress in (*PROGRESS, WAITS):
        for call in CALLS:
            yield "fact", call, progress, partial(ranks.run, one_fact, 1, call, progress, timeout_s=FACT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="of a check, figure or fact; may be repeated")
    parser.add_argument("--part", choices=("check", "figure", "fact"))
    parser.add_argument("--mode", choices=(*MODES, *NARROW, "gloo"))
    parser.add_argument("--fake", action="store_true", help="on a fake of CUDA: tries the checks, not a GPU")
    parser.add_argument("--times", type=int, default=1, help="runs all of it so often")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="what has not begun by then is not run")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.json"))
    options = parser.parse_args()
    if not options.fake and not torch.cuda.is_available():
        print(f"no GPU, or none that torch {torch.__version__} can use: nothing was checked")
        return 2
    report = Report(options.report, options.limit_s)
    print(", ".join(f"{name} {value}" for name, value in report._about.items()))
    made = jobs_on_fake if options.fake else jobs
    for part, name, mode, body in itertools.chain.from_iterable(made() for _ in range(options.times)):
        asked = (options.only or [name], [options.part or part], [options.mode or mode])
        if all(value in wanted for value, wanted in zip((name, part, mode), asked, strict=True)):
            report.run(part, name, mode, body)
    print(f"{report.failed} checks failed" if report.failed else "all checks passed", f"({options.report})")
    return int(report.failed > 0)
