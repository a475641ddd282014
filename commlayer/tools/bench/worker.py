"""The process of one rank: `python -m commlayer.tools.bench.worker SPEC`, with the environment torchrun sets."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import CommError
from ..json_output import STDOUT, deliver
from . import machine, report
from .backends import BackendError, open_backends
from .measure import Bench, Measurement
from .spec import Spec

EXIT_OK = 0
EXIT_WRONG = 1
EXIT_FAILED = 2

MEET_S = 60.0
"""Least time for the ranks to meet, because they import torch first; a collective's timeout may be shorter."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run(spec: Spec) -> int:
    """Measures as one rank of the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    Rank 0 prints the table and writes the JSON. Returns the exit status: 0, 1 if an element was wrong, 2 if the run
    failed.
    """
    # the ranks share the cores: torch's threads would compete with the backends'
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    try:
        for module in spec.imports:
            _import(module)
    except ValueError as error:
        print(f"commlayer bench: rank {rank}: {error}", file=sys.stderr)
        return EXIT_FAILED
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        # Gloo would use all interfaces in turn for the bench's own group, and a scenario may break some.
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces.split(",")[0]
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=max(spec.timeout_s, MEET_S)))
        if interfaces:
            os.environ["GLOO_SOCKET_IFNAME"] = interfaces
        return _run(spec)
    except Exception as error:
        # Python would exit with 1, the status of a wrong result. gloo and the Store have no type for a timeout.
        late = isinstance(error, RuntimeError) and re.search("timed out|timeout", str(error), re.IGNORECASE)
        if late or isinstance(error, (BackendError, CommError, dist.DistError, OSError)):
            hint = f" (--timeout {spec.timeout_s:g}: give more seconds)" if late else ""
            print(f"commlayer bench: rank {rank}: {_first_line(error)}{hint}", file=sys.stderr)
        else:
            traceback.print_exc()
        return EXIT_FAILED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _import(module: str) -> None:
    """Raises ValueError if the module cannot be imported, whatever error it raises."""
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ValueError(f"--import {module!r}: {type(error).__name__}: {error}") from error


def _first_line(error: Exception) -> str:
    """The error without the stack of C++ functions that torch appends."""
    return (str(error).splitlines() or [repr(error)])[0]


def _run(spec: Spec) -> int:
    control: Any = dist.group.WORLD
    rank, world = dist.get_rank(), dist.get_world_size()
    facts = machine.facts()

    table = sys.stderr if spec.json_path == str(STDOUT) else sys.stdout  # as under torchrun

    def show(*lines: str) -> None:
        if rank == 0:
            print("\n".join(lines), file=table, flush=True)

    backends = open_backends(spec.backends, control, spec.timeout_s)
    _await_stress(spec, control)
    results: list[dict[str, Any]] = []

    def on_size(measurements: list[Measurement]) -> None:
        rows = [report.row(spec, measurement, measurements[0]) for measurement in measurements]
        results.extend(rows)
        show(*(report.format_row(spec, row) for row in rows))

    show(*report.header(spec, world, facts))
    local_leader = int(os.environ.get("LOCAL_RANK", rank)) == 0
    Bench(spec, backends, control, local_leader=local_leader).run(on_size)
    show(*report.footer(results))
    document = report.document(spec, world, facts, results)
    if rank == 0 and spec.json_path is not None:
        try:
            deliver(document, Path(spec.json_path), lambda: None)
        except OSError as error:
            raise OSError(f"--json {spec.json_path!r}: {error}") from error
    return EXIT_WRONG if document["wrong"] else EXIT_OK


def _await_stress(spec: Spec, control: dist.ProcessGroup) -> None:
    """Tells the launcher that the ranks are set up, and waits until it has started the scenario's stress."""
    if spec.ready_path is not None and dist.get_rank() == 0:
        ready = Path(spec.ready_path)
        ready.touch()
        while ready.exists():
            time.sleep(0.01)
    dist.barrier(control)


def _die_with_parent() -> None:
    """Ends this rank when the launcher dies (Linux only): it must not keep a core busy."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _die_with_parent()
    sys.exit(run(Spec.from_json(sys.argv[1])))
