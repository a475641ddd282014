"""Runs a command on every host: one process per rank, with the environment torchrun sets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from .network import Network

_POLL_S = 0.05
_END_S = 5.0  # from SIGTERM to SIGKILL


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, which `timeout` and batch systems send, and SIGHUP, as a terminal closes, raise SystemExit, so that
    namespaces are removed, and jobs are ended. In the main thread only: others get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, _frame: sys.exit(128 + number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def tied(command: Sequence[str], number: signal.Signals) -> list[str]:
    """The command, whose process gets the signal when the thread that starts it dies, also by SIGKILL."""
    return ["setpriv", "--pdeathsig", number.name.removeprefix("SIG"), *command]


def run(
    network: Network,
    command: Sequence[str],
    *,
    grace_s: float = 10.0,
    trouble: Callable[[], str | None] = lambda: None,
    note: Callable[[str], None] = lambda _line: None,
) -> int:
    """Runs `command` as every rank of the network and returns the exit status of the first that failed, or 0.

    Each line of output is printed at once, after its rank. After a failure the other ranks have `grace_s` to end by
    themselves, and `note` gets a line with the failed rank and its status. A rank ended by a signal has the status
    128 + signal, as in a shell. Raises RuntimeError as soon as `trouble` returns a text.
    """
    per_host = network.scenario.ranks_per_host
    world = network.scenario.hosts * per_host
    environment = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns: it asks for names of addresses as ::ffff:10.87.0.1
        "PYTHONUNBUFFERED": "1",  # unbuffered, as on a terminal
        **os.environ,
        **network.rendezvous(),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_WORLD_SIZE": str(network.scenario.hosts),
    }

    def poll() -> None:
        if (problem := trouble()) is not None:
            raise RuntimeError(problem)

    forwarders: list[threading.Thread] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            host, local = divmod(rank, per_host)
            process = network.popen(
                host,
                tied(command, signal.SIGKILL),
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that the children of a rank end with it
            )
            processes.append(process)
            for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                forwarders.append(threading.Thread(target=_forward, args=(rank, source, sink), daemon=True))
                forwarders[-1].start()
        failed = wait(processes, grace_s, poll)
        running = [str(rank) for rank, process in enumerate(processes) if process.poll() is None]
    finally:
        _end(processes)
        for forwarder in forwarders:
            forwarder.join(_END_S)
    if failed is None:
        return 0
    status = processes[failed].returncode
    how = f"ended by {_signal_name(-status)}" if status < 0 else f"exit status {status}"
    ended = f"; ended {grace_s:g} s later: rank {', '.join(running)}" if running else ""
    note(f"rank {failed} (host {failed // per_host}) was the first to fail: {how}{ended}")
    return status if status >= 0 else 128 - status


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have none
        return f"signal {number}"


def _forward(rank: int, source: IO[bytes], sink: IO[str]) -> None:
    for line in source:
        sink.write(f"[{rank}] {line.decode(errors='replace').rstrip()}\n")
        sink.flush()


def wait(processes: Sequence[subprocess.Popen[bytes]], grace_s: float, poll: Callable[[], None]) -> int | None:
    """Waits for all; returns the first rank that failed, if any. The others then have `grace_s` to end by themselves.

    `poll` is called all the time, also after the last process has ended; its errors end the waiting.
    """
    failed: int | None = None
    deadline_s = float("inf")
    while time.monotonic() < deadline_s:
        statuses = [process.poll() for process in processes]
        poll()  # it follows the statuses: it may be the reason why the last process ended
        if failed is None:
            failed = next((rank for rank, status in enumerate(statuses) if status), None)
            if failed is not None:
                deadline_s = time.monotonic() + grace_s
        if None not in statuses:
            break
        time.sleep(_POLL_S)
    return failed


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            # the whole session: a rank that has ended may have left children
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline_s = time.monotonic() + _END_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
