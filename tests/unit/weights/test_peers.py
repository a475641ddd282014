import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from commlayer.weights import peers as module
from commlayer.weights.message import PART, WANT, Want
from commlayer.weights.outlet import Outlet
from commlayer.weights.peers import Peers
from tests import ranks
from tests.unit.weights.conftest import KEY
from tests.unit.weights.test_outlet import until

ASKED = Want(3, "name", 0, 1, 0, 0)


@pytest.fixture
def peers(context: Any) -> Iterator[Peers]:
    made = Peers(context, KEY, zmq.Poller())
    yield made
    made.keep([])


def failure(peers: Peers, address: str) -> str:
    end_s = time.monotonic() + ranks.TIMEOUT_S
    while time.monotonic() < end_s:
        found = peers.failures()
        if found:
            assert list(found) == [address]
            return found[address]
        time.sleep(0.005)
    return "none"


def test_parts_come_over_a_connection_that_is_kept(peers: Peers, outlet: Outlet) -> None:
    address = f"127.0.0.1:{outlet.port}"
    got: list[Any] = []

    def give() -> bool:
        found = outlet.hear()
        if found is not None:
            assert found[2:] == (WANT, ASKED.text())
            assert outlet.say(found[0], [PART, b"place", b"bytes"])
        got.extend((address, *(bytes(frame) for frame in frames)) for address, frames in peers.hear())
        assert peers.failures() == {}
        return bool(got)

    for _ in range(2):
        peers.want(address, ASKED)
        until(outlet, give)
        assert got == [(address, PART, b"place", b"bytes")]
        got.clear()
        peers.keep([address])
    assert outlet.count == 1
    peers.keep(["127.0.0.1:1"])
    until(outlet, lambda: outlet.count == 0)


def test_a_connection_that_ends_is_a_failure(peers: Peers, outlet: Outlet) -> None:
    address = f"127.0.0.1:{outlet.port}"
    peers.want(address, ASKED)
    until(outlet, lambda: outlet.hear() is not None)
    assert peers.failures() == {}
    outlet._door.router.unbind(outlet._door.router.last_endpoint)
    for descriptor in list(outlet._door._inside):
        outlet._door._refuse(descriptor)
    assert failure(peers, address) == "its connection ended"
    assert peers.failures() == {}


def test_a_reader_that_is_not_there_is_not_reached(peers: Peers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    peers.want(address, ASKED)
    assert failure(peers, address) == "it was not reached"


def test_a_reader_that_is_silent_is_not_reached(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REACH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        peers.want(address, ASKED)
        assert failure(peers, address) == "it was not reached"


def test_another_secret_is_a_failure(context: Any, outlet: Outlet) -> None:
    strange = Peers(context, bytes([1] * 32), zmq.Poller())
    address = f"127.0.0.1:{outlet.port}"
    strange.want(address, ASKED)
    assert failure(strange, address) == "it was not reached"
