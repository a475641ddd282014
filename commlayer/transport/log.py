"""The log: with COMMLAYER_LOG=info or debug, the logger `commlayer` writes to stderr, with rank and host in each line.

Without the variable the logger is as Python made it: warnings go where the application sends them.
"""

from __future__ import annotations

import logging
import socket

log = logging.getLogger("commlayer")

OFF = "off"

_handler: logging.Handler | None = None


def begin(level: str, rank: int) -> None:
    """Adds the handler for the level `info` or `debug`, once per process. `rank`: this process's number in the job.

    Records do not go to the handlers of the root logger as well, or lines would come twice.
    """
    global _handler
    if _handler is None:
        _handler = logging.StreamHandler()
        log.addHandler(_handler)
        log.propagate = False
    log.setLevel(level.upper())
    form = f"%(asctime)s %(levelname)s commlayer rank {rank} on {socket.gethostname()}: %(message)s"
    _handler.setFormatter(logging.Formatter(form))


def end() -> None:
    """Takes the handler away: for tests."""
    global _handler
    if _handler is not None:
        log.removeHandler(_handler)
        log.propagate = True
        log.setLevel(logging.NOTSET)
        _handler = None
