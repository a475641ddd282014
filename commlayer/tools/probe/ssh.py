"""`commlayer probe --hosts`: starts a rank on each host by ssh, and brings the report here."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .command import EXIT_CLEAN, EXIT_FINDINGS, Report, Spec
from .meeting import MeetingError

_POLL_S = 0.05
_LEAVE_S = 10.0
_FORWARDED = "COMMLAYER_"


@dataclass(frozen=True)
class Remote:
    """How to start the probe on the hosts."""

    hosts: Sequence[str]
    """The names that ssh knows: "a", "user@b". The first one's name must resolve on all."""
    shell: Sequence[str]
    """The words before the host: ssh and its options."""
    python: str
    port: int

    def command(self, rank: int, spec: Spec, environ: Mapping[str, str]) -> list[str]:
        """The command that starts a rank."""
        variables = {name: value for name, value in environ.items() if name.startswith(_FORWARDED)}
        variables |= {"RANK": str(rank), "WORLD_SIZE": str(len(self.hosts)), "MASTER_PORT": str(self.port)}
        variables["MASTER_ADDR"] = self.hosts[0].rpartition("@")[2]
        options = ["--partners", str(spec.partners), "--burst", str(spec.effort.burst_bytes)]
        options += ["--packets", str(spec.effort.train_packets), "--ports", str(spec.effort.flows)]
        options += ["--json", "-"]
        words = ["env", *(f"{name}={value}" for name, value in variables.items())]
        words += [self.python, "-m", "commlayer", "probe", *options]
        return [*self.shell, self.hosts[rank], f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; {shlex.join(words)}"]


def run(remote: Remote, spec: Spec) -> Report:
    """Measures between the hosts. Raises MeetingError, which names the host that failed; its output has the reason."""
    with tempfile.TemporaryFile() as out:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(len(remote.hosts)):
                command = remote.command(rank, spec, os.environ)
                sink = out if rank == 0 else subprocess.DEVNULL
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, start_new_session=True)
                )
            _wait(remote, processes)
        except FileNotFoundError as error:
            raise MeetingError(f"--ssh: {error}") from error
        finally:
            _end(processes)
        out.seek(0)
        try:
            return Report.from_table(json.loads(out.read()))
        except (ValueError, KeyError, TypeError) as error:
            raise MeetingError(f"{remote.hosts[0]}: no report; is it the same version of commlayer?") from error


def _wait(remote: Remote, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits until rank 0 has reported; it alone may end with the status of findings."""
    while True:
        statuses = [process.poll() for process in processes]
        for rank, (host, status) in enumerate(zip(remote.hosts, statuses, strict=True)):
            if status not in (None, EXIT_CLEAN) and (rank, status) != (0, EXIT_FINDINGS):
                raise MeetingError(
                    f"{host} ended with status {status}: its output is above; `{shlex.join(remote.shell)} {host} "
                    f"{remote.python} -m commlayer --version` must work there"
                )
        if statuses[0] is not None:
            return
        time.sleep(_POLL_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Lets the ranks end by themselves, unless one has failed."""
    good = all(process.poll() in (None, EXIT_CLEAN, EXIT_FINDINGS) for process in processes)
    deadline_s = time.monotonic() + (_LEAVE_S if good else 0.0)
    for process in processes:
        try:
            process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
