"""Network namespaces: their names, commands and sockets inside them, and the removal of those of crashed runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "ethtool": "ethtool",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
CAPABILITIES = {"NET_ADMIN": 12, "SYS_ADMIN": 21}  # linux/capability.h
_MARK = "cl"
_OWNED = re.compile(rf"{_MARK}(\d+)-(\d+)-")
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class EmulationError(RuntimeError):
    """The network cannot be emulated here; the text says what is missing."""


def missing() -> str | None:
    """Why networks cannot be emulated on this machine, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    effective = _capabilities()
    lacking = [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]
    if lacking:
        names, options = (" and ".join(f"{what}{name}" for name in lacking) for what in ("CAP_", "--cap-add "))
        return (
            f"network namespaces need {names}, which root lacks in most containers: start the container "
            f"with {options} (or --privileged), or run this outside of it"
        )
    absent = {tool: package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if absent:
        return f"not installed: {', '.join(absent)} (packages {', '.join(dict.fromkeys(absent.values()))})"
    return None


def _capabilities() -> int:
    """The effective capabilities of this process, a bit for each."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)


def call(command: str, text: str | None = None) -> str:
    """Runs a tool with `text` as its input and returns its output. Raises EmulationError if it fails."""
    done = subprocess.run(command.split(), input=text, capture_output=True, text=True)
    if done.returncode:
        forbidden = "Operation not permitted" in done.stderr
        remedy = (
            "; a container's profile (AppArmor, seccomp) may forbid it: start the container --privileged" * forbidden
        )
        raise EmulationError(f"{command}: {done.stderr.strip() or done.returncode}{remedy}")
    return done.stdout


def names() -> list[str]:
    """All named namespaces of this machine."""
    return [line.split()[0] for line in call("ip netns list").splitlines() if line]


def prefix(serial: int) -> str:
    """Prefix of the names of this process's emulation `serial`. The start time tells reused process ids apart."""
    return f"{_MARK}{os.getpid()}-{_started(os.getpid())}-{serial}"


def owned() -> list[str]:
    """The namespaces of every emulation, of any process."""
    return [name for name in names() if _OWNED.match(name)]


def remove(name: str) -> None:
    """Ends the processes in a namespace and deletes it; the interfaces inside go with it."""
    for pid in call(f"ip netns pids {name}").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    call(f"ip netns delete {name}")


def remove_stale() -> list[str]:
    """Removes the namespaces of emulations whose process is gone. Returns their names."""
    stale = []
    for name in owned():
        owner = _OWNED.match(name)
        if owner is not None and _started(int(owner[1])) != int(owner[2]):
            with contextlib.suppress(EmulationError):  # another process may remove it at the same time
                remove(name)
                stale.append(name)
    return stale


def _started(pid: int) -> int | None:
    """Start time of a process, in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # the name before the parenthesis may contain spaces


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Moves the calling thread into a namespace. Sockets made inside belong to the namespace for good."""
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{name}") as target:
        _setns(target.fileno())
        try:
            yield
        finally:
            _setns(before.fileno())


def _setns(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise EmulationError(f"cannot enter a network namespace: {os.strerror(error)}")


def open_socket(name: str, kind: int = socket.SOCK_DGRAM) -> socket.socket:
    """An IPv4 socket of `kind` that lives in namespace `name`."""
    with inside(name):
        return socket.socket(socket.AF_INET, kind)
