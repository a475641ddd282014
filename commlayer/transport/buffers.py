"""Buffers of UDP sockets: the size that the engine asks for, and the remedy where the kernel grants less."""

from __future__ import annotations

BUFFER_BYTES = 8 << 20
"""The size of either buffer, to receive and to send (`native/wire/udp.c`)."""


def advice(receive_bytes: int, send_bytes: int) -> str:
    """The remedy for buffers of these sizes; empty if they need none."""
    granted = {"rmem_max": receive_bytes, "wmem_max": send_bytes}
    clipped = [f"net.core.{name}={BUFFER_BYTES}" for name, size in granted.items() if size < BUFFER_BYTES]
    if not clipped:
        return ""
    return f"the kernel clips socket buffers, so that bursts lose packets: sysctl -w {' '.join(clipped)}"
