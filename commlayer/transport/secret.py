"""The secret of a job that is not in its Store: the content of COMMLAYER_SECRET_FILE.

It is mixed into the key that rank 0 publishes in the Store. A program that can read the Store, but not the file, then
lacks the key.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .members import Members

log = logging.getLogger("commlayer")

LEAST_BYTES = 16

MOST_BYTES = 1 << 20
"""The part of a file that counts."""


def read_secret(path: str) -> bytes:
    """A hash of the file's content; empty without a path.

    Raises ConfigError if the file cannot be read, or is too short, or if every user may write it.
    """
    if not path:
        return b""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe would block
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MOST_BYTES) if stat.S_ISREG(mode) else b""  # a device might never end
    except OSError as error:
        raise ConfigError(
            f"COMMLAYER_SECRET_FILE={path}: {error.strerror}; name a file that this rank can read"
        ) from error
    if len(content.strip()) < LEAST_BYTES:
        raise ConfigError(
            f"COMMLAYER_SECRET_FILE={path}: it has {len(content.strip())} bytes; use at least {LEAST_BYTES}, as "
            f"`head -c 32 /dev/urandom` makes them"
        )
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"COMMLAYER_SECRET_FILE={path}: every user may write it, and so choose the secret; chmod 600 it"
        )
    if mode & stat.S_IROTH:
        _warn(path)
    return hashlib.blake2s(content, person=b"dlcpfile").digest()


@functools.cache
def _warn(path: str) -> None:
    """Once for a file: each group reads it."""
    log.warning("COMMLAYER_SECRET_FILE=%s: every user of this host may read it; chmod 600 it", path)


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
        for other, description in enumerate(descriptions)
        if description.get("secret", "") != fingerprint(secret, str(description.get("life")))
    ]
    if others:
        raise ConfigError(
            f"{members.who}: the content of COMMLAYER_SECRET_FILE is another one on {members.names(others)}, or is "
            f"only here or there; give every rank the same file"
        )
