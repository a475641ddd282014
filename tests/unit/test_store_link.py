"""The connections of a Store are found among all descriptors, and the kernel is told when to give them up."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from commlayer.transport import store_link
from tests.world import open_descriptors


def test_connections_of_a_store_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    limited: list[socket.SocketKind] = []
    real = store_link._limit

    def limit(connection: socket.socket, silence_s: float) -> None:
        real(connection, silence_s)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
        limited.append(connection.type)

    monkeypatch.setattr(store_link, "_limit", limit)
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=5))
    with (
        socket.socketpair()[0],
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        open(os.devnull),
    ):
        datagrams.connect(("127.0.0.1", server.port))
        before = open_descriptors()
        assert store_link.limit(PrefixStore("a", PrefixStore("b", client)), 2.0) == 2  # the server has one of its own
        assert store_link.limit(other, 2.0) == 1
        assert open_descriptors() == before
    assert limited == [socket.SOCK_STREAM] * 3
    assert store_link.limit(HashStore(), 2.0) == 0
    client.set("it", "works")
    assert server.get("it") == b"works"


def test_the_patience_is_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    found: list[tuple[int, ...]] = []
    real = store_link._limit

    def limit(link: socket.socket, silence_s: float) -> None:
        real(link, silence_s)
        options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        found.append(tuple(link.getsockopt(socket.IPPROTO_TCP, option) for option in options))

    monkeypatch.setattr(store_link, "_limit", limit)
    assert [store_link.limit(store, peer_timeout_s) for peer_timeout_s in (0.1, 86400.0)] == [1, 1]
    assert found == [(3000, 1, 1), (3 * 86_400_000, 32767, 32767)]
