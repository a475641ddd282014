"""Traffic from hosts outside the job: steady flows and bursts that share a link with the job under test.

Each sender is a host behind the same switch, whose link has exactly the rate of its flow. So the kernel paces the flow,
which loads only the switch port of its receiver.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from dataclasses import dataclass
from typing import Literal

from . import tcp
from .link import Link
from .namespace import EmulationError, open_socket
from .table import check

Protocol = Literal["udp", "tcp"]

_PATIENCE_S = 0.2  # longest time until a thread sees `stop`
_CONNECT_S = 10.0
_CONTROL = "cubic"  # of TCP, where the flow names none


@dataclass(frozen=True)
class Flow:
    """Traffic from hosts outside the job to one link."""

    to: int
    """The host it goes to."""
    nic: int = 0
    protocol: Protocol = "udp"
    congestion_control: str | None = None
    """Of TCP; None: cubic, whatever the machine's default."""
    dscp: int = 0
    senders: int = 1
    """Number of hosts that send it together."""

    def __post_init__(self) -> None:
        if (name := self.congestion_control) is not None:
            check(tcp.is_name(name), "congestion_control", name, "use a name as cubic or bbr, in quotes")
            check(self.protocol == "tcp", "congestion_control", name, "leave it out, or use protocol = 'tcp'")
        check(0 <= self.dscp <= 63, "dscp", self.dscp, "use 0 to 63")
        check(1 <= self.senders <= 32, "senders", self.senders, "use 1 to 32")

    def source_link(self, target: Link) -> Link:
        """The link of one sender: as fast as the target's."""
        return Link(rate_bps=target.rate_bps, mtu=target.mtu, offloads=target.offloads)


@dataclass(frozen=True)
class Cross(Flow):
    """A steady flow."""

    share: float = 0.5
    """Share of the rate of that link."""

    def __post_init__(self) -> None:
        check(0 < self.share <= 2, "share", self.share, "use a part of the link's rate, more than 0, at most 2")
        super().__post_init__()

    def source_link(self, target: Link) -> Link:
        """The link of one sender."""
        rate_bps = (target.rate_bps or 0) * self.share / self.senders
        return dataclasses.replace(super().source_link(target), rate_bps=rate_bps)


@dataclass(frozen=True)
class Incast(Flow):
    """Simultaneous bursts of several senders, at regular times."""

    senders: int = 4
    burst_bytes: int = 65536
    """Size of each sender's burst."""
    period_ms: float = 20.0

    def __post_init__(self) -> None:
        check(1 <= self.burst_bytes <= 1 << 30, "burst_bytes", self.burst_bytes, "use 1 byte to 1 GiB")
        check(0.1 <= self.period_ms <= 3.6e6, "period_ms", self.period_ms, "use 0.1 ms to an hour")
        super().__post_init__()


class Traffic:
    """A running flow: a thread for each sender and each TCP receiver, with sockets inside the namespaces."""

    def __init__(self, flow: Flow, sources: list[str], target: str, address: str, payload_bytes: int) -> None:
        """`sources` and `target` are names of namespaces, `address` is the target's. Raises EmulationError if this
        kernel does not have the flow's congestion control."""
        self._flow, self._payload_bytes = flow, payload_bytes
        self._stop = threading.Event()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.error: OSError | None = None
        """The error that stopped it early, if any."""
        try:
            sink = self._socket(target, self._kind)
            sink.bind((address, 0))
            senders = [self._sender(source) for source in sources]
        except BaseException:
            self.close()
            raise
        if self._kind == socket.SOCK_STREAM:
            sink.listen(len(sources))
            self._start(self._accept, sink)
        # nobody reads a UDP sink: when its buffer is full the kernel drops the rest, and does not tell the sender
        first_s = time.monotonic() + 0.1
        for sender in senders:
            self._start(self._send, sender, sink.getsockname(), first_s)

    @property
    def _kind(self) -> int:
        return socket.SOCK_DGRAM if self._flow.protocol == "udp" else socket.SOCK_STREAM

    def close(self) -> None:
        """Ends the flow and waits until it has ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for opened in self._open:
            opened.close()

    def _socket(self, namespace: str, kind: int) -> socket.socket:
        self._open.append(open_socket(namespace, kind))
        return self._open[-1]

    def _sender(self, source: str) -> socket.socket:
        out = self._socket(source, self._kind)
        out.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, self._flow.dscp << 2)
        out.settimeout(_CONNECT_S)
        if self._kind == socket.SOCK_STREAM:
            name = self._flow.congestion_control or _CONTROL
            try:
                out.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            except OSError as error:
                raise EmulationError(
                    f"traffic of TCP with congestion control {name!r}: the kernel refuses it ({error}); "
                    f"/proc/sys/net/ipv4/tcp_available_congestion_control has the names of those that are loaded"
                ) from error
        return out

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=self._guard, args=(work, *arguments), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard(self, work: object, *arguments: object) -> None:
        try:
            work(*arguments)  # type: ignore[operator]  # one of the methods below
        except OSError as error:
            if not self._stop.is_set():
                self.error = error

    def _send(self, out: socket.socket, to: tuple[str, int], first_s: float) -> None:
        out.connect(to)
        out.settimeout(_PATIENCE_S)
        flow, piece = self._flow, bytes(self._payload_bytes)
        if not isinstance(flow, Incast):
            while not self._stop.is_set():
                self._push(out, piece)
            return
        burst = [piece] * (flow.burst_bytes // len(piece))
        if rest := flow.burst_bytes % len(piece):
            burst.append(bytes(rest))
        due_s = first_s
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            for packet in burst:
                self._push(out, packet)
            due_s += flow.period_ms / 1e3
            if (late_s := time.monotonic() - due_s) > 0:  # the burst takes longer than the period: skip periods
                due_s += (late_s * 1e3 // flow.period_ms + 1) * flow.period_ms / 1e3

    def _push(self, out: socket.socket, piece: bytes) -> None:
        left = memoryview(piece)
        while left and not self._stop.is_set():
            try:
                left = left[out.send(left) :]
            except TimeoutError:
                continue
            except ConnectionError:
                raise
            except OSError:
                # no carrier or no room at the moment: the timetable may have taken the link down
                self._stop.wait(0.01)

    def _accept(self, sink: socket.socket) -> None:
        sink.settimeout(_PATIENCE_S)
        while not self._stop.is_set():
            try:
                connection, _ = sink.accept()
            except TimeoutError:
                continue
            self._open.append(connection)
            self._start(self._drain, connection)

    def _drain(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE_S)
        room = bytearray(1 << 16)
        while not self._stop.is_set():
            try:
                if connection.recv_into(room) == 0:
                    return
            except TimeoutError:
                continue
