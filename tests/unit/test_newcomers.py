"""Processes that ask to join are seen, and hear of the end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore

from commlayer.errors import ClosedError, ConfigError, OperationTimeoutError, PeerLostError
from commlayer.frontend.elastic.world import World
from commlayer.frontend.group.newcomers import COUNT, Newcomers, _await, ask, settings_of
from commlayer.transport.native import host_key
from commlayer.transport.pulse import Pulse
from commlayer.transport.survivors import Verdict
from tests.world import until

PLACE = (host_key(), os.getpid())


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ends the threads of all pulses."""
    pulses: list[Pulse] = []
    real = Pulse.beat

    def beat(pulse: Pulse) -> None:
        pulses.append(pulse)
        real(pulse)

    monkeypatch.setattr(Pulse, "beat", beat)
    yield
    for pulse in pulses:
        pulse.close()


def opened(store: Any, place: tuple[str, int] = PLACE) -> tuple[World, Newcomers]:
    world = World(store, "token", 0, place, 1.0)
    world.members, world.backend = [0, 1], "commlayer"
    world.add({1: place})
    newcomers = Newcomers(world)
    newcomers.open(settings_of({"batch_size": 4}, "token"), 2)
    newcomers.invites = True
    return world, newcomers


def asked(store: Any, batch_size: int = 4) -> World:
    return ask(World, store.clone(), lambda token: settings_of({"batch_size": batch_size}, token), PLACE, 1.0, 20.0)


def test_a_process_that_asks_is_seen_and_hears_the_answer(store: Any) -> None:
    world, newcomers = opened(store)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asked, store)
        until(lambda: newcomers.waiting() == {2: PLACE})
        world.generation = 5
        assert newcomers.admit(Verdict({1}, [2])) == [2]
        assert newcomers.waiting() == {}
        found = answer.result()
    assert (found.own, found.generation, found.members) == (2, 5, [0, 2])
    assert found.places == {0: PLACE, 1: PLACE, 2: PLACE}
    assert found.backend == world.backend
    later = Newcomers(world)
    later.follow()
    later.invites = True
    store.add(f"commlayer/elastic/token/newcomers/{COUNT}", 1)  # this one never writes
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asked, store)
        until(lambda: later.waiting() == {4: PLACE})  # 2 has its answer
        later.close(ended=True)
        with pytest.raises(ClosedError, match="the job has ended"):
            answer.result()
    newcomers.close(ended=False)


def test_another_batch_is_refused(store: Any) -> None:
    _, newcomers = opened(store)
    with pytest.raises(ConfigError, match="cannot join: batch_size is 5 here and 4 in the job"):
        asked(store, 5)
    assert json.loads(store.get(f"commlayer/elastic/token/newcomers/{COUNT}")) == 2  # it has taken no number
    newcomers.close(ended=False)


def test_a_job_whose_ranks_have_died_takes_nobody(store: Any) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    _, newcomers = opened(store, (host_key(), child))
    with pytest.raises(PeerLostError, match=r"all ranks of the job \(\[0, 1\]\) have died"):
        asked(store)
    newcomers.close(ended=False)


def test_of_those_that_ask_together_one_looks() -> None:
    """The others wait for its word."""
    words = iter([False, False, True])

    def fail() -> bool:
        raise AssertionError("only the first process looks")

    _await(fail, False, math.inf, "late", lambda do: [next(words), do()])
    assert list(words) == []
    looks = iter([False, False, True])
    told: list[bool] = []

    def act(do: Callable[[], bool]) -> list[bool]:
        told.append(do())
        return [told[-1], False]

    _await(lambda: next(looks), True, math.inf, "late", act)
    assert (list(looks), told) == ([], [True])
    with pytest.raises(OperationTimeoutError, match="late"):
        _await(fail, False, 0.0, "late", lambda do: [False, do()])
