"""The command line of `commlayer headroom`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..complaint import fail, note
from ..json_output import JsonOption


def headroom(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", help="The job, as you start it")] = None,
    steps: Annotated[int, typer.Option(help="Measured steps in a row with the same communication")] = 4,
    rounds: Annotated[int, typer.Option(help="How often the kinds of communication take turns")] = 3,
    warmup: Annotated[int, typer.Option(help="Optimizer steps before the first measured one")] = 5,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds after which a run has failed")] = 600.0,
    least: Annotated[float, typer.Option(help="Share of the step below which there is little to win")] = 0.05,
    json_path: JsonOption = None,
) -> None:
    """Say the most that faster communication could win for a job, and by which remedy.

    The unchanged job runs for a few steps, with its communication as it is, shortened and left out in turns, and then
    on commlayer. These steps give wrong results: keep the job from writing over checkpoints that you need.

    Examples: commlayer headroom -- torchrun --nproc-per-node 2 train.py --batch 8

    commlayer headroom -- commlayer emulate clean50 -- python train.py

    With several hosts, start it on each of them, around the same torchrun command.

    Exit status: 0 if there is little to win, 3 if there is more, 2 on errors.
    """
    from ..job.trial import TrialError
    from . import report
    from .command import Options, is_reporter, run

    out = Console(highlight=False, markup=False)

    def say(text: str) -> None:
        if is_reporter():
            note("headroom", text)

    try:
        options = Options(tuple(command or ()), steps, rounds, warmup, timeout_s, least, json_path)
        status = run(options, lambda found: report.show(found, out), say)
    except (ValueError, TrialError, OSError) as error:
        fail("headroom", error)
    raise typer.Exit(status)
