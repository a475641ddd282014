"""Measures the emulated links and compares them with the scenario, so that measurements in them can be trusted.

This process sends numbered UDP packets from sockets inside the namespaces. Statistical figures may differ from the
scenario by four standard errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .event import Event
from .link import Link
from .namespace import open_socket
from .network import Network

_BLAST_S = 1.0
_WINDOW_S = 0.1
_LOSS_S = 2.0
_LOSS_BPS = 60e6  # enough packets for statistics; a busy machine itself loses none at this rate
_SHARE = 0.7  # share of the link's rate when losses are counted: queues must not overflow
_CONTEST_BPS = 20e6
_FAVOURED_SHARE = 0.75  # share of the packets delivered in a contest; two equal flows get half each
_ECHOES = 21
_CS6, _ECT = 48 << 2, 2
_NUMBER = struct.Struct("<I")
_RECEIVE_BUFFER = 32 << 20
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


@dataclass(frozen=True)
class Figure:
    """One line of the comparison."""

    what: str
    declared: str
    measured: str
    good: bool


def check(network: Network) -> Iterator[Figure]:
    """Measures the links of all hosts, one after another, with packets from the next host, and yields the figures.

    Nothing else may run in the network.
    """
    if network.scenario.hosts < 2:
        return
    for host in range(network.scenario.hosts):
        for nic in range(len(network.scenario.nics)):
            probe = _Probe(network, host, nic)
            try:
                yield from probe.figures()
            finally:
                probe.close()


class _Probe:
    """A receiver at one NIC of one host, and senders elsewhere."""

    def __init__(self, network: Network, host: int, nic: int) -> None:
        hosts = network.scenario.hosts
        self.network, self.host, self.nic = network, host, nic
        self.link = network.scenario.link(host, nic)
        self.from_hosts = (host + 1) % hosts, (host + 2) % hosts if hosts > 2 else (host + 1) % hosts
        self.sink = self._socket(host)
        self.sink.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)
        self.sink.bind((network.address(host, nic), 0))
        self.open = [self.sink]

    def close(self) -> None:
        for opened in self.open:
            opened.close()

    def figures(self) -> Iterator[Figure]:
        where, link = f"host {self.host} NIC {self.nic}", self.link
        sender = self.network.scenario.link(self.from_hosts[0], self.nic)
        rates = [rate for rate in (link.rate_bps, sender.rate_bps) if rate is not None]
        if rates:
            yield self._goodput(where, min(rates))
        if link.loss < 1:
            yield from self._losses(where, min([_LOSS_BPS, *(_SHARE * rate for rate in rates)]))
        yield self._round_trip(where, sender)
        if link.priorities:
            yield self._contest(where, "priority: CS6 against CS0", _CS6 | _ECT, _ECT)
        if link.not_ect_buffer_packets:
            yield self._contest(where, "drop precedence: ECT against Not-ECT", _ECT, 0)

    def _socket(self, host: int) -> socket.socket:
        return open_socket(self.network.name(host))

    def _sender(self, tos: int, number: int = 0) -> socket.socket:
        out = self._socket(self.from_hosts[number])
        self.open.append(out)
        out.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        # the kernel doubles it and charges 1.5 times a packet's size: 0.6 fills the link, not the queue
        room = round(self.link.buffer_packets * self.link.frame_bytes * 0.6)
        out.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, room)
        out.connect(self.sink.getsockname())
        return out

    def _goodput(self, where: str, rate_bps: float) -> Figure:
        arrivals = self._receive(lambda: self._blast(self._sender(_ECT), _BLAST_S, 0))
        counts = [len(window) for window in _windows(arrivals)]
        measured_bps = statistics.median(counts) / _WINDOW_S * self.link.payload_bytes * 8 if counts else 0.0
        expected_bps = rate_bps * self.link.payload_bytes / self.link.frame_bytes * (1 - self.link.loss)
        good = abs(measured_bps / expected_bps - 1) < 0.03 + 4 * _spread(self.link, len(arrivals) + 1)
        return Figure(
            f"{where}: UDP goodput", f"{expected_bps / 1e6:.1f} Mbit/s", f"{measured_bps / 1e6:.1f} Mbit/s", good
        )

    def _losses(self, where: str, rate_bps: float) -> Iterator[Figure]:
        count = max(1000, int(rate_bps / 8 / self.link.frame_bytes * _LOSS_S))
        arrivals = self._receive(lambda: self._paced(self._sender(_ECT), count, count / _LOSS_S))
        share, bursts = losses([number for _, number, _ in arrivals], count)
        good = abs(share - self.link.loss) <= 4 * _spread(self.link, count) + (1 / count if self.link.loss else 0)
        yield Figure(f"{where}: loss", f"{self.link.loss:.2%}", f"{share:.2%} of {count}", good)
        if self.link.loss:
            mean = statistics.fmean(bursts) if bursts else 0.0
            # independent losses also follow one another by chance; lengths are geometric
            expected = max(self.link.loss_burst_packets, 1 / (1 - self.link.loss))
            allowed = 4 * math.sqrt(expected * max(expected - 1, self.link.loss) / max(1, len(bursts))) + 0.02
            yield Figure(
                f"{where}: packets lost in a row",
                f"{expected:.2f}",
                f"{mean:.2f} ({len(bursts)} times)",
                bool(bursts) and abs(mean - expected) <= allowed,
            )

    def _round_trip(self, where: str, sender: Link) -> Figure:
        out, times_ms = self._sender(_ECT), []
        out.settimeout(self.link.delay_ms / 500 + sender.delay_ms / 500 + 0.2)
        echo = threading.Thread(target=self._echo, daemon=True)
        echo.start()
        for _ in range(_ECHOES):
            start_s = time.monotonic()
            out.send(b"echo")
            try:
                out.recv(16)
            except TimeoutError:
                continue
            times_ms.append((time.monotonic() - start_s) * 1e3)
        last = self._socket(self.host)
        last.sendto(b"", self.sink.getsockname())  # sent by the host itself: neither lost nor delayed
        last.close()
        echo.join()
        declared = self.link.delay_ms + sender.delay_ms
        measured = min(times_ms, default=math.inf)
        return Figure(
            f"{where}: shortest round trip, from host {self.from_hosts[0]}",
            f"{declared:g} ms",
            f"{measured:.2f} ms",
            # the machine's own time comes on top, more under load
            declared <= measured + 0.05 and measured <= 1.1 * declared + 3,
        )

    def _echo(self) -> None:
        self.sink.settimeout(None)
        while True:
            data, sender = self.sink.recvfrom(2048)
            if not data:
                return
            if data == b"echo":
                self.sink.sendto(data, sender)

    def _contest(self, where: str, what: str, favoured_tos: int, other_tos: int) -> Figure:
        """Two hosts send as fast as they can: the favoured flow must get the link, and the queue drop none of it."""
        sent = [0, 0]

        def send(number: int, tos: int) -> None:
            sent[number] = self._blast(self._sender(tos, number), _BLAST_S, number)

        def both() -> None:
            flows = [threading.Thread(target=send, args=flow) for flow in enumerate((favoured_tos, other_tos))]
            for flow in flows:
                flow.start()
            for flow in flows:
                flow.join()

        with self._slowed():
            got = [flow for _, _, flow in self._receive(both)]
        delivered, share = got.count(0) / max(1, sent[0]), got.count(0) / max(1, len(got))
        declared = 1 - self.link.loss
        return Figure(
            f"{where}: {what}",
            f"{declared:.0%} delivered, over {_FAVOURED_SHARE:.0%} of the link",
            f"{delivered:.0%} delivered, {share:.0%} of the link",
            share > _FAVOURED_SHARE and delivered >= declared - 0.02 - 4 * _spread(self.link, max(1, sent[0])),
        )

    @contextlib.contextmanager
    def _slowed(self) -> Iterator[None]:
        """Slows the link down, so that two senders fill it on a busy machine, too."""
        rate_bps = self.network.scenario.link(self.host, self.nic).rate_bps or 0.0
        slow = Event(0, "rate", host=self.host, nic=self.nic, rate_bps=min(rate_bps, _CONTEST_BPS))
        self.network.apply(slow)
        try:
            yield
        finally:
            self.network.apply(dataclasses.replace(slow, rate_bps=rate_bps))

    def _blast(self, out: socket.socket, seconds: float, flow: int) -> int:
        """Sends at the rate of the sender's own link: the socket's buffer is shorter than the queue."""
        out.settimeout(0.2)
        end_s, number = time.monotonic() + seconds, 0
        while time.monotonic() < end_s:
            try:
                out.send(self._packet(number, flow))
            except TimeoutError:
                continue
            number += 1
        return number

    def _paced(self, out: socket.socket, count: int, per_s: float) -> None:
        start_s = time.monotonic()
        for number in range(count):
            if (early_s := start_s + number / per_s - time.monotonic()) > 0.002:
                time.sleep(early_s)
            out.send(self._packet(number, 0))

    def _packet(self, number: int, flow: int) -> bytes:
        head = _NUMBER.pack(number) + bytes([flow])
        return head + bytes(self.link.payload_bytes - len(head))

    def _receive(self, send: Callable[[], object]) -> list[tuple[float, int, int]]:
        """(time, number, flow) of the packets that arrive, until `send` has returned and the link has been silent."""
        sent = threading.Event()

        def work() -> None:
            try:
                send()
            finally:
                sent.set()

        sender = threading.Thread(target=work, daemon=True)
        sender.start()
        arrivals = []
        # the longest time that the deepest queue and the delay can hold a packet
        self.sink.settimeout(0.3 + self.link.delay_ms / 1e3)
        while True:
            try:
                data = self.sink.recv(65536)
            except TimeoutError:
                if sent.is_set():
                    break
                continue
            arrivals.append((time.monotonic(), _NUMBER.unpack_from(data)[0], data[4]))
        sender.join()
        return arrivals


def losses(numbers: list[int], count: int) -> tuple[float, list[int]]:
    """The share of 0..count-1 that is not among `numbers`, and the lengths of the gaps. Order does not matter."""
    bursts, expected = [], 0
    for number in [*sorted(set(numbers)), count]:
        if number > expected:
            bursts.append(number - expected)
        expected = number + 1
    return sum(bursts) / count, bursts


def _windows(arrivals: list[tuple[float, int, int]]) -> list[list[int]]:
    """The flows of the packets that arrived, by windows of time, without the first and the last window.

    Pauses of a busy machine and the shaper's first burst do not change the median over windows.
    """
    if not arrivals:
        return []
    windows: list[list[int]] = [[] for _ in range(round(_BLAST_S / _WINDOW_S))]
    for at_s, _, flow in arrivals:
        if (number := int((at_s - arrivals[0][0]) / _WINDOW_S)) < len(windows):
            windows[number].append(flow)
    return windows[1:-1]


def _spread(link: Link, count: int) -> float:
    """Standard error of a measured loss share. A burst of B packets counts as one sample of varying length."""
    burst = link.loss_burst_packets
    return math.sqrt(link.loss * (1 - link.loss) * (2 * burst - 1) / count)
