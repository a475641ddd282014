from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from commlayer.weights.line import Line
from commlayer.weights.message import ASK
from commlayer.weights.outlet import Outlet
from tests.unit.weights.conftest import KEY
from tests.unit.weights.test_outlet import until


@pytest.fixture
def opened(context: Any) -> Iterator[list[Line]]:
    made: list[Line] = []
    yield made
    for line in made:
        line.close()


def test_a_connection_that_ends_is_made_anew(context: Any, opened: list[Line], outlet: Outlet) -> None:
    endpoint = f"tcp://127.0.0.1:{outlet.port}"
    line = Line(context, KEY, endpoint, zmq.Poller())
    opened.append(line)
    assert not line.link.was_up
    until(outlet, line.look)
    assert line.link.is_up
    assert not line.look()
    assert line.say([ASK, b"text"])
    heard: list[Any] = []

    def talk() -> bool:
        found = outlet.hear()
        if found is not None:
            assert found[2:] == (ASK, b"text")
            assert outlet.say(found[0], [b"kind", b"text", b"piece"])
        heard.extend([bytes(frame) for frame in frames] for frames in line.hear())
        return bool(heard)

    until(outlet, talk)
    assert heard == [[b"kind", b"text", b"piece"]]
    outlet._door.router.unbind(endpoint)
    for descriptor in list(outlet._door._inside):
        outlet._door._refuse(descriptor)
    until(outlet, lambda: not (line.look() or line.link.is_up))
    assert line.link.was_up
    away_s = line.link.away_since_s
    assert away_s > 0
    line.absent()
    assert line.link.away_since_s > away_s
    outlet._door.router.bind(endpoint)
    until(outlet, line.look)
    assert line.link.is_up


def test_a_connection_with_another_key_is_a_refusal(context: Any, opened: list[Line], outlet: Outlet) -> None:
    line = Line(context, bytes([1]) * 32, f"tcp://127.0.0.1:{outlet.port}", zmq.Poller())
    opened.append(line)
    until(outlet, lambda: line.look() or line.link.refusals >= 2)
    assert not line.link.was_up
