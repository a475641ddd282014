"""Which TCP congestion controls namespaces may choose: a list that the kernel keeps once for the whole machine.

So it is the one setting outside the namespaces that is changed. What was added is noted in a file, for whoever ends
last to take off again: an emulation that is killed cannot, and one that ends must not while another one relies on it.
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
_ADDED = Path("/run/commlayer-tcp-congestion-control")  # lost with a reboot, as the kernel's list is
_NAME = re.compile(r"[a-z0-9_-]{1,15}")


def is_name(name: str) -> bool:
    """Whether a congestion control may be called so."""
    return _NAME.fullmatch(name) is not None


def allow(algorithms: Sequence[str]) -> None:
    """Lets namespaces choose these, until `put_back`. To be called by whoever has a namespace already."""
    if not algorithms:
        return
    with _noted() as file:
        allowed = _ALLOWED.read_text().split()
        extra = [algorithm for algorithm in algorithms if algorithm not in allowed]
        if not extra:
            return
        file.write("".join(f"{algorithm}\n" for algorithm in extra))
        file.flush()  # before the list is changed: this process may be killed at any time
        try:
            _ALLOWED.write_text(" ".join([*allowed, *extra]))
        except OSError as error:
            raise EmulationError(f"TCP congestion control {' '.join(extra)}: not in this kernel ({error})") from error


def put_back() -> None:
    """Takes off the list what emulations have added, if there is none any more that may rely on it."""
    if not _ADDED.exists():
        return
    with _noted() as file:
        if namespace.owned():
            return
        if added := file.read().split():
            _ALLOWED.write_text(" ".join(name for name in _ALLOWED.read_text().split() if name not in added))
        _ADDED.unlink()  # who waits for its lock finds that it is another file by then


@contextlib.contextmanager
def _noted() -> Iterator[IO[str]]:
    """The file of what was added, for one process at a time."""
    while True:
        with _ADDED.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, _ADDED):
                continue  # removed by who had the lock
            file.seek(0)
            yield file
            return


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
