"""`commlayer emulate`: its command line, and a command run in an emulated network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typer.core import TyperCommand

from . import namespace, neighbours, tcp
from .check import check as measure
from .meter import Meter
from .network import Network
from .ranks import run, terminable
from .scenario import Scenario
from .stress import Stress

Note = Callable[[str], None]


class OwnOptions(TyperCommand):
    """A command whose own options end at `--`. Its parameter `command` takes the words behind, whatever they are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        own, command = args[:end], args[end + 1 :]
        rest = super().parse_args(ctx, own)
        if not ctx.resilient_parsing:  # as it is while the shell completes
            if misplaced := ctx.params["command"]:
                ctx.fail(f"{' '.join(misplaced)!r}: put -- before the command: {ctx.command_path} ... -- COMMAND")
            ctx.params["command"] = command
        return rest


def clean(note: Note) -> None:
    """Removes the remains of killed emulations. Raises RuntimeError without the privileges."""
    if (reason := namespace.missing()) is not None:
        raise RuntimeError(reason)
    for name in namespace.remove_stale():
        note(f"removed {name}")
    tcp.put_back()


def emulate(scenario: Scenario, command: Sequence[str], *, check: bool, grace_s: float, note: Note) -> int:
    """Builds the network, measures its links if `check`, runs the command, and returns the exit status."""
    with terminable(), Network(scenario) as network:
        note(str(scenario))
        if network.delayed_by is not None:
            note(f"delay is made by {network.delayed_by}")
        if (excess := neighbours.excess(scenario.hosts, len(scenario.nics))) is not None:
            note(excess)
        good = True
        for figure in measure(network) if check else ():
            good = good and figure.good
            print(
                f"{'ok ' if figure.good else 'BAD'}  {figure.what}: declared {figure.declared}, "
                f"measured {figure.measured}",
                flush=True,
            )
        if command and not good:
            note("a link is unlike its description, so the command was not run; leave --check out to run it anyway")
        if not command or not good:
            return 0 if good else 1
        with Stress(network, note) as stress, Meter(network) as meter:
            status = run(network, command, grace_s=grace_s, trouble=lambda: stress.error, note=note)
        if (shortfall := meter.shortfall) is not None:
            note(shortfall)
        return status
