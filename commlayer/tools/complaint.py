"""How a command says that it has failed."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

EXIT_FAILED = 2


def fail(command: str, error: object) -> NoReturn:
    """Prints the error on stderr, after the name of the command, and ends the command with EXIT_FAILED."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)  # an error may contain brackets
    console.print(f"commlayer {command}: {error}", style="red")
    raise typer.Exit(EXIT_FAILED)
