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

LEAST_S = 3.0
"""The least patience: TCP may send a packet several times in it."""

IDLE_MOST_S = 32767
"""The longest time that the kernel takes between signs of life."""


def root_of(store: Any) -> Any:
    """The Store that all groups of the job share, beneath the prefix (`PrefixStore`) that torch gives each group."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def patience_s(peer_timeout_s: float) -> float:
    """How long a request waits for a host that is silent."""
    return max(PATIENCE * peer_timeout_s, LEAST_S)


def connection(store: Any, peer_timeout_s: float) -> Any:
    """A further connection to the Store, for a thread, with a `limit`: a request that waits holds up all others on its
    connection."""
    found = store.clone()
    limit(found, peer_timeout_s)
    return found


def limit(store: Any, peer_timeout_s: float) -> int:
    """From now on a request over the present connections of this process to a TCPStore fails with torch's
    DistNetworkError once the other host has been silent for three peer timeouts, and three seconds at least. Returns
    how many connections there are: of other kinds of Stores, none."""
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
            with socket.socket(fileno=copy) as link:
                if _is_to(link, port):
                    _limit(link, patience_s(peer_timeout_s))
                    found += 1
    return found


def _is_to(link: socket.socket, port: int) -> bool:
    """By the port alone: names may take seconds to look up, and no other connection loses by an end to its silence."""
    is_tcp = link.family in (socket.AF_INET, socket.AF_INET6) and link.type == socket.SOCK_STREAM
    return is_tcp and link.getpeername()[1] == port


def _limit(link: socket.socket, silence_s: float) -> None:
    interval_s = min(max(1, round(silence_s / 4)), IDLE_MOST_S)
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence_s)),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ):
        link.setsockopt(level, option, value)
