import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from commlayer.transport.native import Engine
from commlayer.weights.beside import HOLD_S, LOOK_S, MEMORY_S, SHARE, Beside


class Counter:
    """The engine's: bytes that training has sent."""

    bytes = 0

    def stats(self) -> dict[str, int]:
        """All counters that are read."""
        return {"payload_bytes_sent": self.bytes}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    made = Counter()

    @contextlib.contextmanager
    def held() -> Iterator[Any]:
        yield made

    monkeypatch.setattr(Engine, "held", held)
    return made


def test_what_is_published_waits_while_training_sends(counter: Counter) -> None:
    beside, now_s = Beside(), 100.0
    beside.look(now_s)
    assert beside.may_publish
    assert not beside.is_there
    for _ in range(5):
        now_s += 1.1 * LOOK_S
        counter.bytes += 10
        beside.look(now_s)
        assert beside.is_sending
    beside.publish(1)  # the share of 50 bytes is above 1
    beside.publish(1)
    assert not beside.may_publish
    now_s += 0.9 * HOLD_S
    beside.look(now_s)
    assert not beside.may_publish
    now_s += 0.2 * HOLD_S
    beside.look(now_s)
    assert beside.may_publish
    assert beside.is_there
    now_s += MEMORY_S
    beside.look(now_s)
    assert not beside.is_there


def test_a_training_that_always_sends_leaves_a_share(counter: Counter) -> None:
    beside, now_s, published = Beside(), 100.0, 0
    for _ in range(1000):
        now_s += 1.1 * LOOK_S
        counter.bytes += 32_000
        beside.look(now_s)
        if beside.may_publish:
            beside.publish(65_536)
            published += 65_536
    assert 0.8 < published * SHARE / counter.bytes < 1.2


def test_training_that_has_sent_since_the_last_transfer_is_there(counter: Counter) -> None:
    beside = Beside()
    beside.look(100.0)
    counter.bytes += 1
    beside.look(200.0)
    assert beside.is_there


def test_a_process_without_training_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside()
    for now_s in (0.0, 1.0, 2.0):
        beside.look(now_s)
        assert beside.may_publish
        assert not beside.is_there
