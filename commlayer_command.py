"""The `commlayer` command. It is outside of the package, because to import that takes seconds, and Ctrl-C meanwhile
should end the command without a traceback."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ends: 128 and the number of SIGINT."""


def main() -> None:
    """Runs the command with the arguments of the process."""
    try:
        from commlayer.tools.cli import app
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    app(prog_name="commlayer")
