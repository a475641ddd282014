"""`job_key`: the key of a job, from the options of a command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

KEY_HEX = 32

SecretOption = Annotated[
    Path | None, typer.Option(help="The job's COMMLAYER_SECRET_FILE (default: that variable)", dir_okay=False)
]


def job_key(key: str, secret_file: Path | None) -> bytes:
    """The key of the job's packets, from that of its Store in hex digits and from its secret file, if it has one.

    Raises ValueError for other digits; ConfigError if the file cannot be read, or is too short.
    """
    from ..config import Config
    from ..transport.secret import mixed, read_secret

    if not re.fullmatch(rf"[0-9a-fA-F]{{{KEY_HEX}}}", key):
        raise ValueError(f"--key {key!r}: use {KEY_HEX} hex digits")
    return mixed(bytes.fromhex(key), read_secret(str(secret_file or Config.from_environment().secret_file)))
