"""Connections to a Store end when the network does: torch lets a request wait for ever for an answer that never comes.

torch has no limit for most requests (`check`, `get` after its wait, `set`), and does not show its sockets. So the
process's own descriptors are looked through, and the kernel is told when to give up (RFC 5482; keep-alive where a
request waits that has arrived).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Any

PATIENCE = 3
"""Peer timeouts: a network that is back after one costs no Store."""


def root_of(store: Any) -> Any:
    """The Store that all groups of the job share, beneath the prefix (`PrefixStore`) that torch gives each group."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def limit(store: Any, peer_timeout_s: float) -> int:
    """From now on a request over the present connections of this process to a TCPStore fails with torch's
    DistNetworkError once the other host has been silent for three peer timeouts. Returns how many connections there
    are: of other kinds of Stores, none."""
    root = root_of(store)
    port, found = getattr(root, "port", None), 0
    if port is None:
        return found
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it is not connected, or has just been closed
            copy = os.dup(int(each.name))
            if not stat.S_ISSOCK(os.fstat(copy).st_mode):
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as connection:
                if _is_to(connection, port):
                    _limit(connection, PATIENCE * peer_timeout_s)
                    found += 1
    return found


def _is_to(connection: socket.socket, port: int) -> bool:
    """By the port alone: names may take seconds to look up, and no other connection loses by an end to its silence."""
    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
    return is_tcp and connection.getpeername()[1] == port


def _limit(connection: socket.socket, silence_s: float) -> None:
    interval_s = max(1, round(silence_s / 4))
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence_s)),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ):
        connection.setsockopt(level, option, value)
