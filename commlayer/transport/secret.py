"""The secret of a job that is not in its Store: the content of COMMLAYER_SECRET_FILE.

It is mixed into the key that rank 0 publishes in the Store. A program that can read the Store, but not the file, then
lacks the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .members import Members

LEAST_BYTES = 16


def read_secret(path: str) -> bytes:
    """A hash of the file's content; empty without a path.

    Raises ConfigError if the file cannot be read, or is too short.
    """
    if not path:
        return b""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"COMMLAYER_SECRET_FILE={path}: {error.strerror}; name a file that this rank can read"
        ) from error
    if len(content.strip()) < LEAST_BYTES:
        raise ConfigError(
            f"COMMLAYER_SECRET_FILE={path}: it has {len(content.strip())} bytes; use at least {LEAST_BYTES}, as "
            f"`head -c 32 /dev/urandom` makes them"
        )
    return hashlib.blake2s(content, person=b"dlcpfile").digest()


def mixed(key: bytes, secret: bytes) -> bytes:
    """The key of the job's packets, from the key in the Store."""
    return hashlib.blake2s(key, key=secret, digest_size=len(key), person=b"dlcp-job").digest() if secret else key


def fingerprint(secret: bytes, life: str) -> str:
    """The value by which ranks compare their secrets in the Store. Each rank's `life` makes it another one; it shows
    whether a guess is right, so a secret must not be one that can be guessed."""
    return hashlib.blake2s(life.encode(), key=secret, digest_size=4, person=b"dlcpseen").hexdigest() if secret else ""


def check_secrets(descriptions: Sequence[Mapping[str, Any]], members: Members, secret: bytes) -> None:
    """Raises ConfigError, which names the ranks whose secret is not this rank's."""
    others = [
        other
        for other, each in enumerate(descriptions)
        if each.get("secret", "") != fingerprint(secret, str(each.get("life")))
    ]
    if others:
        raise ConfigError(
            f"{members.who}: the content of COMMLAYER_SECRET_FILE is another one on {members.names(others)}, or is "
            f"only here or there; give every rank the same file"
        )
