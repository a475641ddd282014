import contextlib
import socket
from collections.abc import Iterator

import pytest

from commlayer.tools.probe.packets import DATA, PING, Port, own_limit_bps
from tests.unit.probe.loopback import COOKIE


@pytest.fixture(params=["127.0.0.1", "::1"])
def ports(request: pytest.FixtureRequest) -> Iterator[tuple[Port, Port]]:
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(contextlib.closing(Port(request.param, COOKIE))) for _ in range(2))
        yield one, other


def test_a_packet_arrives_with_its_numbers_size_and_class(ports: tuple[Port, Port]) -> None:
    one, other = ports
    one.ping((other.address, other.number), 7, size=900, tos=46 << 2 | 2)
    assert other.wait(5)
    arrival = other.receive()
    assert arrival is not None
    assert (arrival.kind, arrival.number, arrival.size, arrival.tos) == (PING, 7, 900, 46 << 2 | 2)
    assert arrival.sender == (one.address, one.number)
    assert arrival.sent_ns <= arrival.arrived_ns + 1_000_000
    assert other.receive() is None


def test_foreign_packets_are_ignored(ports: tuple[Port, Port]) -> None:
    one, other = ports
    stranger = Port(one.address, b"stranger")
    try:
        stranger.ping((other.address, other.number), 1)
        with socket.socket(socket.AF_INET6 if ":" in one.address else socket.AF_INET, socket.SOCK_DGRAM) as plain:
            plain.sendto(b"short", (other.address, other.number))
        one.ping((other.address, other.number), 2)
        assert other.wait(5)
        arrival = other.receive()
    finally:
        stranger.close()
    assert arrival is not None
    assert arrival.number == 2


def test_a_burst_ends_with_its_packets_or_its_time(ports: tuple[Port, Port]) -> None:
    one, other = ports
    to = other.address, other.number
    sent = one.blast(to, run=3, size=500, seconds=60, most=20)
    assert (sent.packets, sent.seconds < 30) == (20, True)
    assert one.blast(to, run=3, size=500, seconds=0.01, most=1 << 60).seconds < 30
    arrival = other.receive()
    assert arrival is not None
    assert (arrival.kind, arrival.run, arrival.number, arrival.size) == (DATA, 3, 0, 500)


def test_packets_that_a_filter_of_this_host_drops_are_sent_and_lost(
    ports: tuple[Port, Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ports

    class Filtering:
        """A socket behind a packet filter that drops every other packet."""

        calls = 0

        def sendto(self, packet: bytes, to: tuple[str, int]) -> None:
            self.calls += 1
            if self.calls % 2:
                raise PermissionError(1, "Operation not permitted")
            raw.sendto(packet, to)

    raw = one._socket
    monkeypatch.setattr(one, "_socket", Filtering())
    sent = one.blast((other.address, other.number), run=1, size=100, seconds=60, most=10)
    monkeypatch.undo()
    numbers = [arrival.number for arrival in iter(other.receive, None)]
    assert sent.packets == 10
    assert numbers == [1, 3, 5, 7, 9]


def test_steady_packets_keep_their_pace(ports: tuple[Port, Port]) -> None:
    one, other = ports
    sent = one.pace((other.address, other.number), run=1, size=100, count=21, per_s=200)
    assert sent.packets == 21
    assert sent.seconds >= 0.095


def test_packets_that_do_not_fit_are_lost_quietly(ports: tuple[Port, Port]) -> None:
    one, other = ports
    one.ping((other.address, other.number), 1, size=70_000)
    assert other.receive() is None


def test_ports_come_from_the_range() -> None:
    first = Port("127.0.0.1", COOKIE)
    number = first.number
    try:
        second = Port("127.0.0.1", COOKIE, (number, min(65535, number + 50)))
        assert number < second.number <= number + 50
        second.close()
        with pytest.raises(ValueError, match=f"COMMLAYER_PORT_RANGE={number}-{number}: no port"):
            Port("127.0.0.1", COOKIE, (number, number))
    finally:
        first.close()


def test_the_probe_knows_its_own_limit() -> None:
    assert own_limit_bps(0.02) > 1e6


def test_packets_that_the_kernel_hands_over_at_once_are_told_apart(ports: tuple[Port, Port]) -> None:
    one, other = ports
    to = other.address, other.number
    count, size = 3000, 1000
    sent, found = 0, []
    while sent < count:  # so few that the buffer has room
        sent += one.blast(to, run=3, size=size, seconds=60, most=300, first=sent).packets
        while (arrival := other.receive()) is not None:
            found.append((arrival.kind, arrival.run, arrival.number, arrival.size))
    one.ping(to, 7, size=77)
    assert other.wait(5)
    assert found == [(DATA, 3, number, size) for number in range(count)]
    arrival = other.receive()
    assert arrival is not None
    assert (arrival.kind, arrival.number, arrival.size) == (PING, 7, 77)
    assert not other.has_received
