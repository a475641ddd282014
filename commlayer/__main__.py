"""`python -m commlayer` is the `commlayer` command."""

from __future__ import annotations

from .tools.cli import app

app(prog_name="commlayer")
