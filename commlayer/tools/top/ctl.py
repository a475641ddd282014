"""The command line of `commlayer ctl`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..complaint import fail
from ..job_key import SecretOption
from ..json_output import JsonOption, check, deliver
from .options import INTERRUPTED, AddressOption, KeyOption, StoreOption, connect

EXIT_REFUSED = 1


def ctl(
    name: Annotated[str, typer.Argument(help="loss-bound, codec, priority, pause or resume")],
    value: Annotated[str, typer.Argument(help="A share, a codec, a class, or an interface as `top --paths` has it")],
    store: StoreOption = None,
    address: AddressOption = None,
    key: KeyOption = None,
    secret_file: SecretOption = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, max=600, help="Seconds after which the change is dropped")
    ] = 60.0,
    json_path: JsonOption = None,
) -> None:
    """Change a running job, on all ranks at one step: loss bound, codec or priority of its gradients, or pause a path.

    The job needs COMMLAYER_TOP and a communication hook (HookState). No rank changes unless all can.

    Example: commlayer ctl loss-bound 0.02 --store 10.0.0.1:29500

    Another: commlayer ctl pause eth1 --store 10.0.0.1:29500 lets data avoid that interface, on all ranks.

    Exit status: 0 if all ranks have changed; 1 if the job refused; 2 if it does not answer or the command is wrong.
    """
    from ...errors import CommError
    from ...telemetry.control import parse
    from .client import NoAnswerError

    try:
        check(json_path)
        asked = {"name": name, "value": parse(name, value), "timeout_s": timeout_s}
        client = connect(store, address, key, secret_file)
        client.view()  # says at once if nobody answers
        print(f"commlayer ctl: asking all ranks for {name} {value}", file=sys.stderr)
        found = client.change(asked, timeout_s, _wait)
        client.close()
    except (ValueError, CommError, NoAnswerError) as error:
        fail("ctl", error)
    except KeyboardInterrupt:
        print(f"commlayer ctl: the ranks may still make the change, for up to {timeout_s:g} s", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None

    def show() -> None:
        if found["applied"]:
            print(f"{name} {value}: applied by {found['ranks']} ranks before step {_steps(found)}")

    deliver(found, json_path, show)
    if not found["applied"]:
        print(f"commlayer ctl: {name} {value}: {found['error']}", file=sys.stderr)
        raise typer.Exit(EXIT_REFUSED)


def _wait(passed_s: float) -> None:
    print(f"commlayer ctl: waiting for a step of all ranks, {passed_s:.0f} s", file=sys.stderr)


def _steps(found: dict[str, Any]) -> str:
    """The step; several of hooks on groups with other ranks (pipeline stages)."""
    return ", ".join(map(str, found["steps"]))
