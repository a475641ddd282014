"""The command line of `commlayer tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..complaint import fail
from ..json_output import JsonOption, deliver

if TYPE_CHECKING:
    from .arm import Arm
    from .command import Report
    from .halving import Tried


def tune(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", help="The job, as you start it")] = None,
    allow: Annotated[
        str,
        typer.Option(
            help="Changes of the numerics that may be tried, separated by commas: lossy (lost packets stay lost), "
            "compressed (values of fewer bits), stale (steps use the gradients of the step before)"
        ),
    ] = "",
    trials: Annotated[int, typer.Option(help="Settings to try, beside the job as it is")] = 6,
    steps: Annotated[int, typer.Option(help="Measured steps of the best settings; others make a third of them")] = 12,
    warmup: Annotated[int, typer.Option(help="Optimizer steps before the first measured one")] = 3,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds after which a run has failed")] = 600.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="File of settings to write")] = Path("commlayer.toml"),
    force: Annotated[bool, typer.Option("--force", help="Write over that file")] = False,
    layouts: Annotated[
        Path | None,
        typer.Option(
            "--parallelism", metavar="FILE", help="Run nothing: predict which parallelism FILE's cluster can carry"
        ),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Find settings with which a job is faster, and write them to commlayer.toml, which the job then reads.

    The unchanged job runs for a few steps again and again, each time with other settings: the results of these steps
    are thrown away, so keep the job from writing over checkpoints that you need. The job stays as it is unless another
    setting is faster beyond the spread. Without --allow, training gives the same results.

    Examples: commlayer tune -- torchrun --nproc-per-node 2 train.py --batch 8

    commlayer tune --allow compressed -- commlayer emulate clean50 -- python train.py

    With several hosts, start it on each of them, around the same torchrun command.

    With --parallelism, it runs no job. It compares data, pipeline, tensor and expert parallelism for the model, the
    hosts and the links of a TOML file: commlayer tune --parallelism cluster.toml

    Trials need optuna: pip install optuna.

    Exit status: 0, also if nothing is faster; 2 on errors.
    """
    from ...errors import ConfigError
    from ..headroom.command import is_reporter
    from ..job.trial import TrialError
    from . import command as tuning

    if layouts is not None:
        _predict(layouts, command, json_path)
        return
    console = Console(stderr=True, highlight=False, markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        options = tuning.Options(
            command=tuple(command or ()),
            allowed=tuple(filter(None, allow.split(","))),
            trials=trials,
            steps=steps,
            warmup=warmup,
            timeout_s=timeout_s,
            file=out,
            force=force,
            json_path=json_path,
        )
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("where the step's time goes", total=None)

            def note(text: str) -> None:
                if is_reporter():
                    console.print(f"commlayer tune: {text}", soft_wrap=True)

            def advance(tried: Tried) -> None:
                note(line(tried))
                seen.add(tried.arm)
                bar.update(task, completed=len(seen), description=f"after {tried.arm}"[:40])

            def begin(count: int) -> None:
                bar.update(task, total=count, description="trials")

            seen: set[Arm] = set()
            report = tuning.run(options, note, advance, begin)
    except (ValueError, TrialError, ConfigError, OSError) as error:
        fail("tune", error)
    if not is_reporter():
        return
    deliver(report.table, json_path, lambda: show(report, out, Console(highlight=False, markup=False)))


def _predict(file: Path, command: list[str] | None, json_path: Path | None) -> None:
    from ...errors import ConfigError
    from ..json_output import check
    from . import parallelism

    try:
        if command:
            raise ConfigError(f"--parallelism {file} runs no job: leave {command[0]} out")
        check(json_path)
        found = parallelism.Question.read(file).answer()
    except (ValueError, OSError) as error:
        fail("tune", error)
    deliver(
        parallelism.table(found), json_path, lambda: parallelism.show(found, Console(highlight=False, markup=False))
    )


def line(tried: Tried) -> str:
    """The result of an arm's last trial in a line."""
    from ..headroom.verdict import seconds
    from .reasons import told_error

    if tried.fault or tried.timing is None:
        return f"{tried.arm}: failed: {tried.fault.splitlines()[0] if tried.fault else 'no steps'}"
    error = tried.prediction_error
    predicted = "" if error is None else f"; {seconds(tried.predicted_s)} predicted, {told_error(error)}"
    return f"{tried.arm}: {seconds(tried.timing.median_s)} per step ({len(tried.timing.steps_s)} steps{predicted})"


def show(report: Report, file: Path, out: Console) -> None:
    """Prints the result: the arms that were tried, a sentence for each choice, and what to do next."""
    from ..headroom.verdict import seconds

    if report.outcome is not None:
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("settings", overflow="fold")
        for column in ("predicted", "error", "measured", "steps"):
            table.add_column(column, justify="right")
        for tried in report.outcome.tried:
            measured = ("failed", "0") if tried.timing is None else _figures(tried)
            style = "bold" if tried is report.outcome.chosen else None
            error = "" if tried.prediction_error is None else f"{tried.prediction_error:+.0%}"
            table.add_row(str(tried.arm), seconds(tried.predicted_s), error, *measured, style=style)
        out.print(table)
        out.print()
    out.print(report.summary)
    for name, sentence in report.reasons.items():
        out.print(f"- {name}: {sentence}")
    if report.text:
        out.print(f"\nWritten to {file}; a job started in this folder reads commlayer.toml. Check: commlayer config")


def _figures(tried: Tried) -> tuple[str, str]:
    from ..headroom.verdict import seconds

    assert tried.timing is not None  # noqa: S101  # the caller has looked
    return seconds(tried.timing.median_s), str(len(tried.timing.steps_s))
