"""Packets of the probe, and the UDP socket of one network interface that sends and receives them."""

from __future__ import annotations

import collections
import contextlib
import errno
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...transport.sockets import BUFFER_BYTES
from . import cpu

COOKIE_BYTES = 8
HEADER = struct.Struct(f"!{COOKIE_BYTES}sB3xIIQ")
"""Cookie of the job, kind, run, number, and the sender's wall clock in ns."""
PONG_BODY = struct.Struct("!BxHI")
"""TOS byte and bytes of the ping, as they arrived, and the ns from its arrival to the pong."""

PING, PONG, DATA, END, RESULT = range(1, 6)

_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_SO_TIMESTAMPNS, _SO_RXQ_OVFL = 35, 40
_IP_RECVERR, _IPV6_RECVERR, _MSG_ERRQUEUE = 11, 25, 0x2000
_ERROR_BYTES = 16  # size of struct sock_extended_err, which the address of the router follows
_ICMP = (2, 3)  # origins of an error: ICMP, ICMPv6
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3  # don't fragment, and believe no cached path MTU
_TIMESPEC = struct.Struct("@ll")
_INT = struct.Struct("@i")
_SHORT = struct.Struct("@H")
_UINT = struct.Struct("@I")
_ANCILLARY_BYTES = 128
_LARGEST = 65536
_LARGEST_SENT = 65000
_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104
SEGMENTS_MAX = 44
"""Packets that the kernel takes, or hands over, at once."""
_DOUBLE_AFTER = 32  # sends without waiting, until twice as many packets leave at once
_CATCH_UP_S = 0.005  # a sender that was not scheduled may send this much at once
_READY_S = 0.05

Address = tuple[str, int]


class Arrival(NamedTuple):
    """A packet of this job, as it arrived."""

    kind: int
    run: int
    number: int
    sent_ns: int
    arrived_ns: int
    """The time when the kernel took it from the interface."""
    tos: int
    dropped: int
    """Packets that the full socket had dropped before it, as the kernel counts: modulo 2**32."""
    size: int
    """Bytes of UDP payload."""
    sender: Address
    body: bytes


@dataclass(frozen=True)
class Sent:
    """The sender's account of a run of packets."""

    packets: int
    seconds: float
    blocked_s: float
    """Time in which the socket's buffer was full: the interface did not take more. Waiting for a CPU is not in it."""


def grow_buffers(sock: socket.socket) -> tuple[int, int]:
    """Asks for the buffers that the engine asks for. Returns the bytes that the kernel gave, to receive and to send."""
    for force, plain in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        try:
            sock.setsockopt(socket.SOL_SOCKET, force, BUFFER_BYTES)  # without CAP_NET_ADMIN it is refused
        except OSError:
            sock.setsockopt(socket.SOL_SOCKET, plain, BUFFER_BYTES)
    receive, send = (sock.getsockopt(socket.SOL_SOCKET, option) // 2 for option in (socket.SO_RCVBUF, socket.SO_SNDBUF))
    return receive, send  # the kernel doubles the sizes, for its own bookkeeping


class Port:
    """The socket of one address of this host. Foreign packets, without the job's cookie, are ignored."""

    def __init__(self, address: str, cookie: bytes, port_range: Sequence[int] = (), *, share: int = 1) -> None:
        """share: the number of ports that share the send buffer of one."""
        self.version = 6 if ":" in address else 4
        self.address = address
        self._cookie = cookie
        self._level = socket.IPPROTO_IPV6 if self.version == 6 else socket.IPPROTO_IP
        self._tos_kind = socket.IPV6_TCLASS if self.version == 6 else socket.IP_TOS
        self._socket = socket.socket(socket.AF_INET6 if self.version == 6 else socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._buffer = bytearray(_LARGEST)
        self._received: collections.deque[Arrival] = collections.deque()
        self._segments_max = SEGMENTS_MAX
        try:
            self._prepare(share)
            self._bind(port_range)
        except BaseException:
            self.close()
            raise

    def _prepare(self, share: int) -> None:
        # The send buffer stays small: a sender that must wait for the interface notices it.
        kept = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        grow_buffers(self._socket)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kept // share)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
        with contextlib.suppress(OSError):  # an old kernel: packets come one by one
            self._socket.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        report, discover = socket.IP_RECVTOS, _IP_MTU_DISCOVER
        if self.version == 6:
            report, discover = socket.IPV6_RECVTCLASS, _IPV6_MTU_DISCOVER
        self._socket.setsockopt(self._level, report, 1)
        self._socket.setsockopt(self._level, discover, _PMTUDISC_PROBE)

    def _bind(self, port_range: Sequence[int]) -> None:
        if not port_range:
            self._socket.bind((self.address, 0))
            return
        first, last = port_range
        for port in range(first, last + 1):
            with contextlib.suppress(OSError):
                self._socket.bind((self.address, port))
                return
        raise ValueError(f"COMMLAYER_PORT_RANGE={first}-{last}: no port of {self.address} is free; use a wider range")

    @property
    def number(self) -> int:
        """The UDP port."""
        return int(self._socket.getsockname()[1])

    def fileno(self) -> int:
        """The descriptor of the socket, for select."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    # ---- sending

    def send(self, kind: int, to: Address, *, run: int = 0, number: int = 0, body: bytes = b"", size: int = 0) -> None:
        """Sends one packet of at least `size` bytes; one that the host cannot send is lost like any other."""
        self._send_one(self._packet(kind, run, number, body, size), to, [])

    def ping(self, to: Address, number: int, *, size: int = 0, tos: int = 0, hops: int = 0) -> None:
        """Sends a ping of at least `size` bytes with this TOS byte, and with `hops`, for so many hops only."""
        control = [(self._level, self._tos_kind, _INT.pack(tos))] if tos else []
        if hops:
            kind = socket.IPV6_HOPLIMIT if self.version == 6 else socket.IP_TTL
            control.append((self._level, kind, _INT.pack(hops)))
        self._send_one(self._packet(PING, 0, number, b"", size), to, control)

    def pong(self, ping: Arrival, arrived_ns: int) -> None:
        """Answers a ping that this process got at `arrived_ns`."""
        body = PONG_BODY.pack(ping.tos, min(ping.size, 0xFFFF), min(time.time_ns() - arrived_ns, 0xFFFFFFFF))
        packet = HEADER.pack(self._cookie, PONG, ping.run, ping.number, ping.sent_ns) + body
        self._send_one(packet, ping.sender, [])

    def data(self, to: Address, run: int, number: int, size: int) -> None:
        """Sends one packet of a train."""
        self._send_one(self._packet(DATA, run, number, b"", size), to, [])

    def blast(
        self, to: Address, *, run: int, size: int, seconds: float, most: int, first: int = 0, at_once: int = 1
    ) -> Sent:
        """Sends packets of `size` bytes, numbered from `first` on, as fast as the interface takes them, `most` at most,
        for so long. Where it takes them faster than this process sends them one by one, several leave at once: at first
        `at_once`."""
        most_at_once = max(1, min(self._segments_max, _LARGEST_SENT // size))
        packets, number, blocked_s = bytearray(most_at_once * size), first, 0.0
        at_once, unblocked = min(at_once, most_at_once), 0
        start = time.monotonic()
        end_ns = time.time_ns() + round(seconds * 1e9)
        while number < first + most:
            now_ns = time.time_ns()
            if now_ns >= end_ns:
                break
            count = min(at_once, first + most - number)
            for at in range(count):
                HEADER.pack_into(packets, at * size, self._cookie, DATA, run, number + at, now_ns)
            try:
                self._send_segments(memoryview(packets)[: count * size], size, to)
                number += count
                unblocked += 1
                if unblocked >= _DOUBLE_AFTER and at_once < most_at_once:
                    at_once, unblocked = min(2 * at_once, most_at_once), 0
            except BlockingIOError:
                before_s, waited_s = time.monotonic(), cpu.waited_s()
                select.select([], [self], [], _READY_S)
                blocked_s += max(0.0, time.monotonic() - before_s - (cpu.waited_s() - waited_s))
                at_once, unblocked = max(1, at_once // 2), 0
            except OSError as error:
                if count > 1:  # the kernel or the interface cannot do it
                    at_once = most_at_once = self._segments_max = 1
                elif error.errno != errno.ENOBUFS:  # dropped on this host: a packet filter says EPERM
                    number += 1
                else:
                    time.sleep(0.0005)  # the queue of the interface is full
                    blocked_s += 0.0005
        return Sent(number - first, time.monotonic() - start, blocked_s)

    def _send_segments(self, packets: memoryview, size: int, to: Address) -> None:
        if len(packets) == size:
            self._socket.sendto(packets, to)
        else:
            self._socket.sendmsg([packets], [(_SOL_UDP, _UDP_SEGMENT, _SHORT.pack(size))], 0, to)

    def pace(self, to: Address, *, run: int, size: int, count: int, per_s: float) -> Sent:
        """Sends `count` packets of `size` bytes, evenly spaced."""
        packet = bytearray(size)
        start = due = time.monotonic()
        for number in range(count):
            wait_s = due - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            elif wait_s < -_CATCH_UP_S:
                due -= wait_s + _CATCH_UP_S
            HEADER.pack_into(packet, 0, self._cookie, DATA, run, number, time.time_ns())
            self._send_one(packet, to, [])
            due += 1 / per_s
        return Sent(count, time.monotonic() - start, 0.0)

    def _packet(self, kind: int, run: int, number: int, body: bytes, size: int) -> bytes:
        return (HEADER.pack(self._cookie, kind, run, number, time.time_ns()) + body).ljust(size, b"\0")

    def _send_one(self, packet: bytes | bytearray, to: Address, control: list[tuple[int, int, bytes]]) -> None:
        for _ in range(8):
            try:
                self._socket.sendmsg([packet], control, 0, to)
                return
            except BlockingIOError:
                select.select([], [self], [], _READY_S)
            except OSError:  # too large for the interface, no route, refused
                return

    # ---- receiving

    def receive(self) -> Arrival | None:
        """The next packet of this job, if there is one."""
        while not self._received:
            try:
                size, control, _, sender = self._socket.recvmsg_into([self._buffer], _ANCILLARY_BYTES)
            except BlockingIOError:
                return None
            except OSError:  # an ICMP error for an earlier packet
                continue
            self._take_in(size, control, sender[:2])
        return self._received.popleft()

    def _take_in(self, size: int, control: list[tuple[int, int, bytes]], sender: Address) -> None:
        """Keeps the packets of this job among those that the kernel handed over at once."""
        arrived_ns, tos, dropped, segment = 0, 0, 0, size
        for level, what, data in control:
            if level == self._level:
                tos = data[0]
            elif level == _SOL_UDP:
                segment = _INT.unpack(data[: _INT.size])[0]
            elif what == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(data[: _TIMESPEC.size])
                arrived_ns = seconds * 1_000_000_000 + nanoseconds
            elif what == _SO_RXQ_OVFL:
                dropped = _UINT.unpack(data[: _UINT.size])[0]
        arrived_ns = arrived_ns or time.time_ns()
        buffer, cookie = self._buffer, self._cookie
        for start in range(0, size, segment or 1):
            end = min(start + segment, size)
            if end - start < HEADER.size:
                continue
            claimed, kind, run, number, sent_ns = HEADER.unpack_from(buffer, start)
            if claimed != cookie:
                continue
            body = b"" if kind == DATA else bytes(buffer[start + HEADER.size : end])
            self._received.append(
                Arrival(kind, run, number, sent_ns, arrived_ns, tos, dropped, end - start, sender, body)
            )

    def hear_errors(self, wanted: bool) -> None:
        """Whether the kernel keeps ICMP errors for `next_error`."""
        kind = _IPV6_RECVERR if self.version == 6 else _IP_RECVERR
        self._socket.setsockopt(self._level, kind, int(wanted))
        while not wanted and self.next_error() is not None:
            pass

    def next_error(self) -> str | None:
        """The address of the router that reported the next ICMP error; None if there is no error."""
        while True:
            try:
                control = self._socket.recvmsg(0, 512, _MSG_ERRQUEUE)[1]
            except OSError:
                return None
            for level, _, data in control:
                if level != self._level or len(data) < _ERROR_BYTES + 8 or data[4] not in _ICMP:
                    continue
                if self.version == 6:
                    return socket.inet_ntop(socket.AF_INET6, data[_ERROR_BYTES + 8 : _ERROR_BYTES + 24])
                return socket.inet_ntop(socket.AF_INET, data[_ERROR_BYTES + 4 : _ERROR_BYTES + 8])

    def wait(self, seconds: float) -> bool:
        """Waits until there is something to receive. Returns whether there is."""
        return bool(wait_for([self], seconds))

    @property
    def has_received(self) -> bool:
        """Whether `receive` has a packet without asking the kernel."""
        return bool(self._received)


def wait_for(ports: Sequence[Port], seconds: float) -> list[Port]:
    """Waits until some of the ports have something to receive; returns these."""
    found = [port for port in ports if port.has_received]
    return found or select.select(ports, [], [], max(0.0, seconds))[0]


def own_limit_bps(seconds: float = 0.1) -> float:
    """The rate of full packets that this process can send and receive by itself: the best of several batches on
    loopback. Sender and receiver of a path are two processes, so the slower half counts."""
    port = Port("127.0.0.1", b"loopback")
    try:
        size, batch = 1472, 512
        to = (port.address, port.number)
        best, end = 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            start = time.monotonic()
            port.blast(to, run=0, size=size, seconds=seconds, most=batch)
            middle = time.monotonic()
            received = 0
            while port.receive() is not None:
                received += 1
            slower_s = max(middle - start, time.monotonic() - middle)
            best = max(best, received * size * 8 / slower_s)
        return best
    finally:
        port.close()
