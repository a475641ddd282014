"""The engine's UDP sockets, as the kernel made them: buffers, and offloads of segmentation."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any, NamedTuple

from .native import Engine
from .status import lib

_UDP_SEGMENT = 103
_UDP_GRO = 104

BUFFER_BYTES = 8 << 20
"""The size of either buffer, to receive and to send (`native/wire/udp.c`)."""


class Socket(NamedTuple):
    """One socket of the engine."""

    port: dict[str, Any]
    """Interface, address, port number and MTU, as in `Engine.describe`."""
    receive_bytes: int
    send_bytes: int
    has_gso: bool
    """Whether a run of packets leaves in one system call."""
    has_gro: bool
    """Whether a run of packets arrives in one system call."""

    @property
    def text(self) -> str:
        """A line for the log."""
        port = self.port
        offloads = ", ".join(f"{'' if there else 'no '}{name}" for name, there in self._offloads())
        return (
            f"{port['ifname']} {port['address']}:{port['port']}, MTU {port['mtu']}; buffers of "
            f"{_mib(self.receive_bytes)} (receive) and {_mib(self.send_bytes)} (send); {offloads}"
        )

    @property
    def advice(self) -> str:
        """The remedy for buffers that the kernel has clipped; empty if it has not."""
        return buffer_advice(self.receive_bytes, self.send_bytes)

    def _offloads(self) -> list[tuple[str, bool]]:
        return [("GSO", self.has_gso), ("GRO", self.has_gro)]


def sockets(engine: Engine) -> list[Socket]:
    """The engine's sockets, and those of its second one; of a wire without sockets none."""
    found = []
    for index, port in enumerate(engine.describe()["ports"]):
        descriptor = os.dup(lib.cl_engine_descriptor(engine.raw, index))
        with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as opened:  # else it is no socket
            found.append(_read(port, opened))
    return found if engine.second is None else found + sockets(engine.second)


def _read(port: dict[str, Any], opened: socket.socket) -> Socket:
    # The kernel doubles the sizes, for its own bookkeeping.
    receive, send = (
        opened.getsockopt(socket.SOL_SOCKET, option) // 2 for option in (socket.SO_RCVBUF, socket.SO_SNDBUF)
    )
    return Socket(port, receive, send, _has(opened, _UDP_SEGMENT), bool(_has(opened, _UDP_GRO)))


def _has(opened: socket.socket, option: int) -> bool:
    """Whether the kernel knows UDP_SEGMENT; whether UDP_GRO is on."""
    try:
        value = opened.getsockopt(socket.IPPROTO_UDP, option)
    except OSError:
        return False
    return option == _UDP_SEGMENT or value != 0


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.3g} MiB"


def buffer_advice(receive_bytes: int, send_bytes: int) -> str:
    """The remedy for buffers of these sizes; empty if they need none."""
    granted = {"rmem_max": receive_bytes, "wmem_max": send_bytes}
    clipped = [f"net.core.{name}={BUFFER_BYTES}" for name, size in granted.items() if size < BUFFER_BYTES]
    if not clipped:
        return ""
    return f"the kernel clips socket buffers, so that bursts lose packets: sysctl -w {' '.join(clipped)}"
