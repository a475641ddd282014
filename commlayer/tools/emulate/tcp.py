"""The TCP congestion controls that namespaces may choose: the kernel has one list for the whole machine.

This list is the one setting outside the namespaces that an emulation changes. A file notes the added names, and the
last emulation removes them from the list: a killed one cannot, and others may still need them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from . import namespace
from .namespace import EmulationError

_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_ADDED = Path("/run/commlayer-tcp-congestion-control")  # a reboot clears it, like the kernel's list
_NAME = re.compile(r"[a-z0-9_-]{1,15}")


def is_name(name: str) -> bool:
    """Whether this may be the name of a congestion control."""
    return _NAME.fullmatch(name) is not None


def allow(algorithms: Sequence[str]) -> None:
    """Lets namespaces choose these until `put_back`. The caller must have a namespace already."""
    if not algorithms:
        return
    with _noted() as file:
        allowed = _ALLOWED.read_text().split()
        extra = [algorithm for algorithm in algorithms if algorithm not in allowed]
        if not extra:
            return
        file.write("".join(f"{algorithm}\n" for algorithm in extra))
        file.flush()  # it is written before the list changes: this process may be killed at any time
        try:
            _ALLOWED.write_text(" ".join([*allowed, *extra]))
        except OSError as error:
            raise EmulationError(f"TCP congestion control {' '.join(extra)}: not in this kernel ({error})") from error


def put_back() -> None:
    """Removes the names added by emulations from the list, if no emulation is left."""
    if not _ADDED.exists():
        return
    with _noted() as file:
        if namespace.owned():
            return
        if added := file.read().split():
            _ALLOWED.write_text(" ".join(name for name in _ALLOWED.read_text().split() if name not in added))
        _ADDED.unlink()  # a process that waits for its lock then finds another file


@contextlib.contextmanager
def _noted() -> Iterator[IO[str]]:
    """The file of added names, for one process at a time."""
    while True:
        with _ADDED.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, _ADDED):
                continue  # the former holder of the lock has removed it
            file.seek(0)
            yield file
            return


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
