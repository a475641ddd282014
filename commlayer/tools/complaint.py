"""How a command says that it has failed."""

from __future__ import annotations

from rich.console import Console

EXIT_FAILED = 2


def complain(command: str, error: object) -> None:
    """Prints the error on stderr, after the name of the command."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)  # an error may contain brackets
    console.print(f"commlayer {command}: {error}", style="red")
