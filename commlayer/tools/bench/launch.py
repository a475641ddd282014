"""Starts the ranks as processes of this machine, one or more per namespace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from ..emulate import tcp
from ..emulate.meter import Meter
from ..emulate.namespace import EmulationError
from ..emulate.network import Network
from ..emulate.ranks import terminable, wait
from ..emulate.stress import Stress
from ..json_output import STDOUT
from . import report
from .spec import Spec

EXIT_FAILED = 2
_GRACE_S = 5.0

CommandFor = Callable[[int, Sequence[str]], list[str]]


def under_torchrun() -> bool:
    """Whether torchrun, or another launcher, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(spec: Spec, ranks: int) -> int:
    """Runs `spec` with `ranks` processes. Returns the exit status of the first rank that failed, or 0.

    Raises EmulationError if the emulated network cannot be built, ValueError if ranks and hosts do not match.
    """
    if spec.json_path != str(STDOUT):
        return _launch(spec, ranks, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        status = _launch(dataclasses.replace(spec, json_path=str(path)), ranks, sys.stderr)
        if path.exists():
            print(path.read_text(encoding="utf-8"), end="", flush=True)
        return status


def _launch(spec: Spec, ranks: int, table: IO[str] | None) -> int:
    """`table`: where rank 0 prints it; None: where this process prints."""
    if spec.scenario is None:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        # gloo would look up the host name, which may name another interface or none
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        return _run_ranks(spec, ranks, environment, lambda _rank, command: list(command), table)
    hosts = spec.scenario.hosts
    if ranks % hosts:
        raise ValueError(f"{ranks} ranks on {hosts} hosts: expected a multiple of the hosts")
    per_host = ranks // hosts
    with (
        terminable(),
        tempfile.TemporaryDirectory() as folder,
        Network(spec.scenario) as network,
        contextlib.ExitStack() as stack,
    ):
        tcp.allow(sorted({backend.tcp_cc for backend in spec.backends if backend.tcp_cc}))
        # traffic and timetable begin with the measurement, not with the start of the ranks
        ready = Path(folder, "ready")
        events: list[tuple[float, str]] = []
        stress, meter = Stress(network, lambda line: events.append((time.monotonic(), line))), Meter(network)

        def begin() -> None:
            if ready.exists() and not begun:
                begun.append(True)
                stack.enter_context(stress)
                stack.enter_context(meter)
                ready.unlink()

        begun: list[bool] = []
        status = _run_ranks(
            dataclasses.replace(spec, ready_path=str(ready)),
            ranks,
            network.rendezvous(),
            lambda rank, command: network.command(rank // per_host, command),
            table,
            begin,
        )
        if stress.error is not None:
            raise EmulationError(stress.error)
        shortfall = meter.shortfall
    if shortfall is not None:
        sys.stderr.write(f"commlayer bench: {shortfall}\n")
    if (events or shortfall) and spec.json_path is not None and Path(spec.json_path).exists():
        report.add_network(Path(spec.json_path), events, shortfall)
    return status


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port of this host's address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _run_ranks(
    spec: Spec,
    ranks: int,
    environment: dict[str, str],
    command_for: CommandFor,
    table: IO[str] | None,
    poll: Callable[[], None] = lambda: None,
) -> int:
    package_root = str(Path(__file__).parents[3])
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # as in ranks.py
        **os.environ,
        **environment,
        "WORLD_SIZE": str(ranks),
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, inherited))),
    }
    worker = [sys.executable, "-m", "commlayer.tools.bench.worker", spec.to_json()]
    with contextlib.ExitStack() as stack:
        logs: list[IO[str]] = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            stack.enter_context(
                _process(
                    command_for(rank, worker),
                    {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    log if rank else None,
                    table,
                )
            )
            for rank, log in enumerate(logs)
        ]
        failed = wait(processes, _GRACE_S, poll)
        if failed is None:
            return 0
        # One failed rank makes the others fail, so only its output explains the failure. Rank 0 writes to our stderr.
        logs[failed].seek(0)
        sys.stderr.write(logs[failed].read())
        status = processes[failed].returncode
        return status if 0 < status <= EXIT_FAILED else EXIT_FAILED


@contextlib.contextmanager
def _process(
    command: list[str], environment: dict[str, str], log: IO[str] | None, table: IO[str] | None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=environment, stdout=table, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
