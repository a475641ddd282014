"""The starter of a trial: times of all ranks, and errors that say what happened."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from commlayer.tools.job import record
from commlayer.tools.job.record import Record, Step
from commlayer.tools.job.trial import (
    JobFailedError,
    NoStepsError,
    TooFewStepsError,
    Trial,
    TrialError,
    run_trial,
)
from tests.world import until

JOB = """
import os, pathlib, sys

assert "COMMLAYER_LOG" not in os.environ and os.environ["COMMLAYER_MTU"] == "1400"
for name, text in {files!r}.items():
    pathlib.Path(os.environ["COMMLAYER_TRIAL"], name).write_text(text)
print("it was", "a job")
sys.exit({status})
"""


def trial(world: int = 2, steps: int = 3, status: int = 0, written: Sequence[int] = range(2)) -> Trial:
    """A trial of 3 steps of a job of `world` ranks, of which those in `written` write the times of `steps` ones."""
    files = {}
    for rank in written:
        lines = [record.line(Step("real", 0.1 * (rank + 1)))] * steps
        lines += [Record(rank, (), world=world).end_line()] * (steps == 3)
        files[record.path(Path(), rank).name] = "\n".join(lines)
    return run_trial(
        [sys.executable, "-I", "-S", "-c", JOB.format(files=files, status=status)],
        environment={"COMMLAYER_MTU": "1400", "COMMLAYER_LOG": ""},
        steps=3,
        warmup=1,
        timeout_s=110,
    )


def test_a_trial_has_the_times_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLAYER_LOG", "debug")
    found = trial()
    assert found.ranks == 2
    assert found.step_s == ((0.1, 0.1, 0.1), (0.2, 0.2, 0.2))
    assert found.median_s == pytest.approx(0.15)
    assert found.elapsed_s > 0


def test_the_median_is_that_of_whole_steps() -> None:
    """A step that is short on one rank because it was long on another one is no short step."""
    first = tuple(Step("real", step_s) for step_s in (1.0, 3.0, 2.0))
    second = tuple(Step("real", step_s) for step_s in (3.0, 1.0, 3.0))
    assert Trial((Record(0, first), Record(1, second)), 9.0).median_s == 2.0


def test_errors_say_what_happened() -> None:
    with pytest.raises(JobFailedError, match=r"(?s)ended with status 5.*its last output:\n  it was a job"):
        trial(status=5)
    with pytest.raises(TooFewStepsError, match="after 3 optimizer steps on rank 0; the trial needs 4"):
        trial(steps=2)
    with pytest.raises(TooFewStepsError, match="lacks the times of rank 2, 3"):
        trial(world=4)
    with pytest.raises(NoStepsError, match="no optimizer made a step after 1 steps, which warm up"):
        trial(written=[])


def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(JobFailedError, match="is it installed"):
        run_trial(["no-such-command"], environment={}, steps=1, warmup=1, timeout_s=10)


def test_a_job_that_hangs_ends(tmp_path: Path) -> None:
    """Its children, which a launcher leaves behind, end, too."""
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 100 & echo $! >{pid}; wait"]
    for timeout_s in (0.5, 5, 40):  # a busy machine may start no shell within the first
        with pytest.raises(TrialError, match=rf"made 0 of 1 measured steps in {timeout_s} s.*on each of them"):
            run_trial(command, environment={}, steps=1, warmup=1, timeout_s=timeout_s)
        if pid.exists() and pid.read_text().strip():
            break
    state = Path("/proc", pid.read_text().strip(), "stat")
    until(lambda: not state.exists() or state.read_text().split()[2] == "Z")


def test_the_last_lines_of_a_job_that_hangs_are_told() -> None:
    command = [sys.executable, "-S", "-c", "print('waits for a lock'); import time; time.sleep(100)"]
    for timeout_s in (1, 5, 40):  # as above
        with pytest.raises(JobFailedError, match="made 0 of 1 measured steps") as failed:
            run_trial(command, environment={}, steps=1, warmup=1, timeout_s=timeout_s)
        if "output" in str(failed.value):
            break
    assert str(failed.value).endswith("\nits last output:\n  waits for a lock")


STARTER = """
import sys
from commlayer.tools.job.trial import run_trial

job = "import os, pathlib, time; pathlib.Path(os.environ['COMMLAYER_TRIAL'], 'pid').write_text(str(os.getpid()))"
command = [sys.executable, "-I", "-S", "-c", job + "; time.sleep(100)"]
run_trial(command, environment={}, steps=3, warmup=1, timeout_s=90)
"""


def started(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The starter of a trial, and the process of its job."""
    starter = subprocess.Popen([sys.executable, "-c", STARTER], env={**os.environ, "TMPDIR": str(folder)})

    def text() -> str:
        return "".join(file.read_text() for file in folder.glob("commlayer-trial-*/pid"))

    until(lambda: bool(text()))
    return starter, int(text())


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is absent")
def test_a_killed_starter_takes_the_job_along(tmp_path: Path) -> None:
    starter, job = started(tmp_path)
    starter.kill()
    starter.wait(60)
    until(lambda: not Path(f"/proc/{job}/exe").exists())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    starter, job = started(tmp_path)
    starter.send_signal(number)
    assert starter.wait(60) == 128 + number
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(job, 0)
