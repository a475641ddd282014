"""One process group per backend under test, all in one run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...config import PRIORITIES, Policy
from ...frontend.group.backend import CommProcessGroup
from ...frontend.group.options import NAME, Options
from ...transport.native import Engine
from .beside import Beside
from .spec import BackendSpec

COUNTERS = (
    *("packets_sent", "packets_retransmitted", "packets_lost", "packets_spurious"),
    *("packets_given_up", "packets_late", "messages_stopped"),
)

_TCP_CC = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class BackendError(RuntimeError):
    """A backend could not be created; the text names it and the reason."""


@dataclass(frozen=True)
class Backend:
    """A backend under test."""

    spec: BackendSpec
    group: dist.ProcessGroup
    tcp_cc: tuple[str, ...]
    """Congestion controls, as the kernel reports them, of the TCP connections that this rank opened for it."""
    beside: Beside | None = None
    """Bulk traffic beside the measured operations."""

    def counters(self) -> dict[str, int]:
        """`COUNTERS` of this rank's engine; empty for other backends."""
        if not isinstance(self.group, CommProcessGroup):
            return {}
        stats = Engine.shared_report().stats
        return {name: stats[name] for name in COUNTERS}


def _tcp_sockets() -> dict[int, str]:
    """Congestion control of each connected TCP socket of this process, by inode."""
    algorithms: dict[int, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            fd = int(entry.name)
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as connection:
                connection.getpeername()
                raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                algorithms[status.st_ino] = raw.split(b"\0")[0].decode()
    return algorithms


@contextlib.contextmanager
def _namespace_tcp_cc(algorithm: str | None) -> Iterator[None]:
    """Makes `algorithm` the default of the network namespace, which new sockets take."""
    if algorithm is None:
        yield
        return
    before = _TCP_CC.read_text()
    try:
        _TCP_CC.write_text(algorithm)
        yield
    except OSError as error:
        raise BackendError(f"cannot set TCP congestion control {algorithm!r} in this namespace: {error}") from error
    finally:
        _TCP_CC.write_text(before)


def _is_ours(spec: BackendSpec) -> bool:
    return spec.name == NAME


def _new_group(spec: BackendSpec, timeout_s: float) -> Any:
    options = Options(spec.policy, timeout=timedelta(seconds=timeout_s)) if _is_ours(spec) else None
    group = dist.new_group(backend=spec.name, timeout=timedelta(seconds=timeout_s), pg_options=options)
    dist.all_reduce(torch.ones(1), group=group)
    return group


def _remedy(name: str) -> str:
    """The names to use instead of one that torch does not know; for others, its error says what is missing."""
    if name.lower() in dist.Backend.backend_list:
        return ""
    known = [
        other
        for other in dist.Backend.backend_list
        if "cpu" in dist.Backend.backend_capability.get(other, ())
        and other != "fake"  # it moves no bytes
        and getattr(dist, f"is_{other}_available", lambda: True)()
    ]
    return f"; use {' or '.join(sorted(known))}, or name with --import the module that registers {name!r}"


def open_backend(spec: BackendSpec, control: dist.ProcessGroup, timeout_s: float) -> Backend:
    """Creates the group of all ranks and runs one all-reduce, which opens connections that are made lazily.

    Raises BackendError if the backend is unknown, cannot be created, or did not get its congestion control.
    """
    before = _tcp_sockets()
    with _namespace_tcp_cc(spec.tcp_cc):
        # the first rank connects only after all namespaces have the new default
        dist.barrier(control)
        try:
            group = _new_group(spec, timeout_s)
            beside = None
            if spec.beside_bytes:
                last = dataclasses.replace(spec, policy=Policy(priority=PRIORITIES - 1) if _is_ours(spec) else Policy())
                beside = Beside(_new_group(last, timeout_s), control, spec.beside_bytes)
        except Exception as error:  # an unknown name raises four types, AssertionError among them
            raise BackendError(f"cannot create backend {spec.name!r}: {error}{_remedy(spec.name)}") from error
        dist.barrier(control)
    used = tuple(sorted({cc for inode, cc in _tcp_sockets().items() if inode not in before}))
    if spec.tcp_cc is not None and used != (spec.tcp_cc,):
        raise BackendError(f"backend {spec}: its connections use {used or 'no TCP'}, not {spec.tcp_cc!r}")
    return Backend(spec, group, used, beside)


def open_backends(specs: Sequence[BackendSpec], control: dist.ProcessGroup, timeout_s: float) -> list[Backend]:
    """Opens a backend for each spec. Specs that differ only in the call, as in a cast, share a group. Raises
    BackendError."""
    opened: dict[BackendSpec, Backend] = {}
    backends = []
    for spec in specs:
        connection = dataclasses.replace(spec, cast=None, chunks=1)
        if connection not in opened:
            opened[connection] = open_backend(connection, control, timeout_s)
        backends.append(dataclasses.replace(opened[connection], spec=spec))
    return backends
