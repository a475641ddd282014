"""`commlayer.publish` over slow links, to readers that leave, and with strangers at its port."""

import contextlib
import multiprocessing
import resource
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import commlayer
from commlayer.errors import PeerLostError
from tests import ranks
from tests.process.test_metrics import free_port

PATIENCE_S = ranks.TIMEOUT_S
RATE_BYTES_S = 2_000_000
PIECE_BYTES = 20_000
DESCRIPTORS = 160


class SlowLink:
    """Passes the bytes of one port to another, those of its answers at a limited rate."""

    def __init__(self, port: int) -> None:
        self.port, self._to = free_port(), port
        self.most_bytes = 1 << 60
        """The bytes of answers after which a connection ends."""
        self.rate = RATE_BYTES_S
        """Bytes of answers per second."""
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                far.connect(("127.0.0.1", self._to))
                self._sockets += [near, far]
                for source, sink, rate in ((near, far, None), (far, near, self.rate)):
                    threading.Thread(target=self._carry, args=(source, sink, rate), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, rate: int | None) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while (piece := source.recv(PIECE_BYTES)) and carried < self.most_bytes:
                sink.sendall(piece)
                if rate:
                    carried += len(piece)
                    time.sleep(len(piece) / rate)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for opened in self._sockets:
            opened.close()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def link(port: int) -> Iterator[SlowLink]:
    made = SlowLink(port)
    yield made
    made.close()


def test_a_state_that_takes_longer_than_the_silence_limit_arrives(port: int, link: SlowLink) -> None:
    source = {"weight": torch.randn(4_000_000)}
    with (
        commlayer.publish(source, f"127.0.0.1:{port}") as publisher,
        commlayer.subscribe(f"127.0.0.1:{link.port}") as reader,
    ):
        publisher.commit(1)
        found = reader.latest(18)
        assert found is not None
        assert torch.equal(found.tensors()["weight"], source["weight"])
        assert link.connections == 1
        publisher.close(0.0)


def test_connections_that_always_end_within_a_version_are_an_error(port: int, link: SlowLink) -> None:
    link.most_bytes = 1_000_000
    source = {"weight": torch.randn(500_000)}
    with (
        commlayer.publish(source, f"127.0.0.1:{port}") as publisher,
        commlayer.subscribe(f"127.0.0.1:{link.port}", timeout_s=PATIENCE_S) as reader,
    ):
        publisher.commit(1)
        with pytest.raises(PeerLostError, match="ended 3 times within a version, at last 1; this reader holds nothing"):
            next(reader)
        link.most_bytes = 1 << 60
        assert next(reader).number == 1
        publisher.close(0.0)


def test_a_reader_that_leaves_is_forgotten(port: int, link: SlowLink) -> None:
    address = f"127.0.0.1:{port}"
    with commlayer.publish({"a": torch.randn(9_000_000)}, address) as publisher:
        publisher.commit(1)
        server = publisher._server
        assert server is not None
        gone = commlayer.subscribe(address)
        next(gone)
        with contextlib.suppress(TypeError):
            gone.latest(0.0)  # it asks for the next one
        late = commlayer.subscribe(f"127.0.0.1:{link.port}")
        until_s = time.monotonic() + PATIENCE_S
        while not server._departures and time.monotonic() < until_s:
            assert late.latest(0.0) is None  # an answer to it begins
        assert server._departures
        late.close()
        gone.close()
        known = (server._readers, server._waiting, server._departures)
        while any(known) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert not any(known)


def crowded(port: int, line: Connection) -> None:
    """A publisher in a process with few descriptors: how many it had in use at most, and whether others were left."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    most, is_left = 0, True
    with commlayer.publish({"a": torch.zeros(3)}, f"127.0.0.1:{port}"):
        line.send("begun")
        while not line.poll(0.01):
            try:
                most = max(most, len(list(Path("/proc/self/fd").iterdir())))
            except OSError:
                is_left = False
    line.send((most, is_left))


def test_strangers_leave_descriptors_to_the_trainer(port: int) -> None:
    context = multiprocessing.get_context("forkserver")
    line, theirs = context.Pipe()
    process = context.Process(target=crowded, args=(port, theirs))
    process.start()
    assert line.poll(PATIENCE_S)
    assert line.recv() == "begun"
    strangers = []
    for _ in range(2 * DESCRIPTORS):  # all of them within the time that a handshake may take
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        time.sleep(0.008)
    line.send("end")
    assert line.poll(PATIENCE_S)
    most, is_left = line.recv()
    for stranger in strangers:
        stranger.close()
    process.join(PATIENCE_S)
    assert is_left
    assert most < DESCRIPTORS * 3 // 4
