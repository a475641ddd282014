import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from commlayer.errors import ConfigError
from commlayer.weights.message import ASK, WINDOW
from commlayer.weights.outlet import Outlet
from commlayer.weights.peers import Peer
from tests import ranks
from tests.unit.weights.conftest import KEY


def until(outlet: Outlet, condition: Callable[[], object]) -> None:
    """Serves until it holds."""
    poller = zmq.Poller()
    for socket in outlet.sockets:
        poller.register(socket, zmq.POLLIN)
    end_s = time.monotonic() + ranks.TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        outlet.look(dict(poller.poll(5)))


def peer(context: Any, outlet: Outlet, key: bytes = KEY) -> Peer:
    return Peer(context, key, f"127.0.0.1:{outlet.port}")


class Messages:
    """A number of messages that leave."""

    def __init__(self, count: int) -> None:
        self.left = count

    @property
    def message(self) -> list[Any] | None:
        """The next one."""
        return [b"kind", b"%d" % self.left, bytes(100_000)] if self.left else None

    def advance(self) -> None:
        """One has left."""
        self.left -= 1


def test_a_port_is_found_and_a_taken_one_is_refused(context: Any, outlet: Outlet) -> None:
    other = zmq.Context()
    with pytest.raises(ConfigError, match="use a free port"):
        Outlet(other, KEY, f"tcp://127.0.0.1:{outlet.port}")
    other.destroy(linger=0)


def test_messages_leave_in_turns_while_there_is_room(context: Any, outlet: Outlet) -> None:
    readers = [peer(context, outlet) for _ in range(2)]
    heard: list[bytes] = []

    def hear() -> bool:
        with contextlib.suppress(ValueError):
            while (found := outlet.hear()) is not None:
                identity, descriptor, kind, text = found
                assert outlet.has(descriptor)
                assert (kind, text) == (ASK, b"text")
                heard.append(identity)
        return len(heard) == 2

    for reader in readers:
        reader.socket.send_multipart([ASK, b"text"])
    until(outlet, hear)
    assert outlet.count == 2
    leaving = {identity: Messages(500) for identity in heard}
    assert outlet.push(leaving) == (True, [])
    assert [its.left for its in leaving.values()] == [500 - WINDOW] * 2
    for _ in range(500):
        outlet.push(leaving)
    assert all(0 < its.left < 500 for its in leaving.values())  # nobody reads
    got = [0, 0]

    def flow() -> bool:
        _, ended = outlet.push(leaving)
        assert not ended
        for number, reader in enumerate(readers):
            while reader.socket.poll(0):
                assert int(reader.socket.recv_multipart()[1]) == 500 - got[number]
                got[number] += 1
        return got == [500, 500]

    until(outlet, flow)
    assert outlet.sent_bytes == sum(2 * (4 + len(str(left)) + 100_000) for left in range(1, 501))
    leaving = {heard[0]: Messages(1 << 30)}
    readers[0].close()
    until(outlet, lambda: outlet.count == 1)
    until(outlet, lambda: outlet.push(leaving) == (False, [heard[0]]))  # the news comes before the router knows
    readers[1].close()


class Glimpse:
    """A message that is gone at the second look."""

    looks = 0

    @property
    def message(self) -> list[Any] | None:
        """Another thread changes it."""
        self.looks += 1
        return [b"kind"] if self.looks == 1 else None

    def advance(self) -> None:
        """It has left."""


def test_a_message_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    outlet, said = Outlet.__new__(Outlet), []

    def say(identity: bytes, frames: list[Any]) -> bool:
        said.append((identity, frames))
        return True

    monkeypatch.setattr(outlet, "say", say)
    assert outlet.push({b"a": Glimpse()}) == (True, [])
    assert said == [(b"a", [b"kind"])]


def test_a_message_of_another_form_is_refused(context: Any, outlet: Outlet) -> None:
    reader = peer(context, outlet)
    reader.socket.send_multipart([b"one"])

    def hear() -> bool:
        try:
            assert outlet.hear() is None
        except ValueError:
            return True
        return False

    until(outlet, hear)
    reader.close()
