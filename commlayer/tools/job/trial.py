"""`run_trial`: runs a user's command for a few optimizer steps, with other environment variables, and times them.

    trial = run_trial(["torchrun", "--nproc-per-node", "2", "train.py"], environment={"COMMLAYER_MTU": "9000"},
                      steps=10, warmup=3, timeout_s=300)
    print(trial.median_s)

The command may be anything whose processes inherit the environment: torchrun on this host, on each of several hosts
(every host runs its own starter), `commlayer emulate ... -- python train.py`. The ranks write their records into a
folder, see `steps.py`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from commlayer_environment import TRIAL as TRIAL_VARIABLE

from ..emulate.ranks import terminable, tied
from . import record
from .record import Record
from .spec import Phase, Spec, real

LINES_KEPT = 80
"""The last lines of the job's output, for errors."""

_POLL_S = 0.1
_END_S = 10.0  # from SIGTERM to SIGKILL: emulations remove their namespaces

Progress = Callable[[int, int], None]
"""Takes the measured steps so far, and all of them."""


class TrialError(RuntimeError):
    """A trial gave no times."""


class JobFailedError(TrialError):
    """The job ended with an error, or ran too long."""


class NoStepsError(TrialError):
    """The job ended without a step of an optimizer."""


class TooFewStepsError(TrialError):
    """The job ended before the last step of the trial."""


@dataclass(frozen=True)
class Trial:
    """The measured steps of a job."""

    records: tuple[Record, ...]
    """One for each rank, in their order."""
    elapsed_s: float
    """The time of the whole trial, start and warm-up included."""

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return len(self.records)

    @property
    def step_s(self) -> tuple[tuple[float, ...], ...]:
        """The step times of each rank after the warm-up."""
        return tuple(rank.step_s for rank in self.records)

    @property
    def median_s(self) -> float:
        """The median step; a step takes the mean of its times on the ranks."""
        return statistics.median(statistics.fmean(times) for times in zip(*self.step_s, strict=True))


def run_trial(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    steps: int,
    warmup: int,
    timeout_s: float,
    phases: Sequence[Phase] = (),
    progress: Progress | None = None,
) -> Trial:
    """Runs the command until each rank has made `warmup` and `steps` optimizer steps.

    A step is one call of `step()` of the first optimizer of a process that makes one: accumulation over several
    batches is one step, and other optimizers do not count. `phases`: the communication of each measured step, real if
    not given. `environment` is added to this process's; an empty value unsets a variable.

    Raises TrialError: JobFailedError, NoStepsError or TooFewStepsError.
    """
    spec = Spec(warmup, tuple(phases) or real(steps), timeout_s)
    begin_s = time.monotonic()
    with terminable(), tempfile.TemporaryDirectory(prefix="commlayer-trial-") as name:
        folder = Path(name)
        spec.write(folder)
        # unbuffered, as on a terminal: what a job that hangs has written must be there when it is ended
        given = {"PYTHONUNBUFFERED": "1", **os.environ, **environment, TRIAL_VARIABLE: name}
        output = _run(command, {key: value for key, value in given.items() if value}, folder, spec, progress)
        records = record.read(folder)
    _check(records, spec, output, command)
    return Trial(records, time.monotonic() - begin_s)


def _run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, spec: Spec, progress: Progress | None
) -> Sequence[str]:
    """Runs the command to its end; returns its last lines. Raises JobFailedError."""
    output: deque[str] = deque(maxlen=LINES_KEPT)
    try:
        process = subprocess.Popen(
            _tied(command, environment),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise JobFailedError(f"{shlex.join(command)}: {error.strerror}; is it installed on this host?") from error
    reader = threading.Thread(target=_read, args=(process.stdout, output), daemon=True)
    reader.start()
    deadline_s = time.monotonic() + spec.timeout_s
    try:
        while process.poll() is None:
            if time.monotonic() > deadline_s:
                done = max((len(rank.steps) for rank in record.read(folder)), default=0)
                raise JobFailedError(_with_output(_late(done, spec), output))
            if progress is not None:
                _tell(folder, spec, progress)
            time.sleep(_POLL_S)
    finally:
        _end(process)
        reader.join(_END_S)
    if process.returncode:
        how = f"status {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
        raise JobFailedError(_with_output(f"the job ended with {how}: {shlex.join(command)}", output))
    return output


def _tied(command: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    """The command, which ends when this process is killed: torchrun ends its ranks at SIGTERM, and an emulation
    removes its namespaces. As it is where util-linux is absent, and where the error must be that of the command."""
    path = environment.get("PATH")
    if shutil.which("setpriv", path=path) is None or shutil.which(command[0], path=path) is None:
        return command
    return tied(command, signal.SIGTERM)


def _late(done: int, spec: Spec) -> str:
    said = (
        f"the job made {done} of {len(spec.phases)} measured steps in {spec.timeout_s:g} s, and was ended; allow more "
        "time (--timeout), or fewer steps"
    )
    if not done:  # torchrun waits for the others without a word
        said += "; with several hosts, see whether this command runs on each of them, or ended there with an error"
    return said


def _read(source: IO[str], output: deque[str]) -> None:
    for line in source:
        output.append(line.rstrip())


def _tell(folder: Path, spec: Spec, progress: Progress) -> None:
    first = next(iter(sorted(folder.glob("rank-*.jsonl"))), None)
    if first is not None:
        with contextlib.suppress(OSError):
            progress(min(len(spec.phases), first.read_text(encoding="utf-8").count("\n")), len(spec.phases))


def _end(process: subprocess.Popen[str]) -> None:
    """Ends what is left of the job."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            if number == signal.SIGTERM and not _is_alive(process.pid):
                return


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _check(records: Sequence[Record], spec: Spec, output: Sequence[str], command: Sequence[str]) -> None:
    """Raises an error unless every rank has made all steps."""
    if not records:
        raise NoStepsError(
            _with_output(
                f"no optimizer made a step after {spec.warmup} steps, which warm up: let the job run longer, or warm "
                "up less (--warmup). If it makes steps at all, these must be of an optimizer of torch.optim, in a "
                f"Python that has commlayer: {shlex.join(command)}",
                output,
            )
        )
    short = next((of_rank for of_rank in records if not of_rank.is_complete), None)
    if short is not None:
        raise TooFewStepsError(
            _with_output(
                f"the job ended after {spec.warmup + len(short.steps)} optimizer steps on rank {short.rank}; the trial "
                f"needs {spec.steps} ({spec.warmup} to warm up): let the job run longer, or ask for fewer steps",
                output,
            )
        )
    world = max(of_rank.world for of_rank in records)
    if len(records) != world:
        missing = sorted(set(range(world)) - {of_rank.rank for of_rank in records})
        raise TooFewStepsError(f"the trial lacks the times of rank {', '.join(map(str, missing))}")


def _with_output(text: str, output: Sequence[str]) -> str:
    return "\n".join([text, *(["its last output:", *(f"  {line}" for line in output)] if output else [])])
