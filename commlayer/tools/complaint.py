"""How a command says what it does, and that it has failed."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

EXIT_FAILED = 2


def note(command: str, text: object, style: str | None = None) -> None:
    """Prints a line on stderr, after the name of the command."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)  # an error may contain brackets
    console.print(f"commlayer {command}: {text}", style=style)


def fail(command: str, error: object) -> NoReturn:
    """Prints the error as `note` does, and ends the command with EXIT_FAILED."""
    note(command, error, "red")
    raise typer.Exit(EXIT_FAILED)
