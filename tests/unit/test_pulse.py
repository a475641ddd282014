"""Which processes live: those of this host by the kernel, others by their beats in the Store."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from commlayer.transport import pulse
from commlayer.transport.pulse import Pulse
from tests.world import open_descriptors, until


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)


class Shared:
    """One Store with several connections."""

    def __init__(self) -> None:
        self._store = HashStore()

    def clone(self) -> Shared:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_the_end_of_a_process_of_this_host_shows_at_once() -> None:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    before = open_descriptors()
    places = {7: ("here", os.getpid()), **{number: ("here", child.pid) for number, child in enumerate(children)}}
    one = Pulse(HashStore(), 7, places, timeout_s=60.0)
    assert one.dead([0, 1]) == set()
    children[0].kill()
    until(lambda: one.dead([0, 1]) == {0})  # nobody has reaped it
    children[0].wait()
    assert one.dead([0, 1]) == {0}
    assert one.dead([1]) == set()
    children[1].kill()
    children[1].wait()
    assert Pulse(HashStore(), 7, places, timeout_s=60.0).dead([0, 1]) == {0, 1}  # ended before
    for _ in range(2):
        one.close()
    assert open_descriptors() == before


def test_a_process_of_another_host_that_does_not_beat_is_dead_after_the_timeout() -> None:
    store = Shared()
    places = {number: (f"host {number}", 1) for number in range(3)}
    ends = [Pulse(store, number, places, timeout_s=0.5) for number in range(2)]  # 2 never comes
    until(lambda: ends[0].dead([1, 2]) == {2})
    until(lambda: ends[1].dead([0, 2]) == {2})
    assert ends[0].dead([1]) == set()
    ends[1].close()
    begin = time.monotonic()
    until(lambda: ends[0].dead([1, 2]) == {1, 2})
    assert time.monotonic() - begin > 0.3
    ends[0].close()
    assert not [thread for thread in threading.enumerate() if thread.name == "commlayer-pulse"]


def test_a_process_that_is_watched_is_known_to_be_silent_before_anybody_asks() -> None:
    store = Shared()
    places = {number: (f"host {number}", 1) for number in range(4)}
    ends = [Pulse(store, number, places, timeout_s=0.5) for number in range(4)]
    until(lambda: store.check(["0", "1", "2", "3"]))
    assert ends[0].dead([1, 2, 3]) == set()
    for number in (1, 2):  # 0 watches 1, and then 2, which 1 would watch
        ends[number].close()
    until(lambda: store.check(["silent 1", "silent 2"]))
    assert ends[3].dead([0, 1, 2]) == {1, 2}  # the first time that it looks
    store.set("2", "it goes on")
    assert ends[3].dead([0, 1, 2]) == {1}
    for each in (ends[0], ends[3]):
        each.close()


def test_a_new_process_of_this_host_must_beat_until_it_is_trusted() -> None:
    store = Shared()
    child = subprocess.Popen(["sleep", "60"])
    one = Pulse(store, 0, {0: ("here", os.getpid())}, timeout_s=0.2)
    one.add(1, ("here", child.pid), beats=True)
    assert one.dead([1]) == set()
    until(lambda: one.dead([1]) == {1})  # it lives, and stands still
    store.set("1", "it goes on")
    assert one.dead([1]) == set()
    one.trust()
    time.sleep(0.3)
    assert one.dead([1]) == set()
    child.kill()
    child.wait()
    assert one.dead([1]) == {1}
    one.close()


def test_processes_that_are_gone_are_forgotten() -> None:
    store, before = Shared(), open_descriptors()
    child = subprocess.Popen(["sleep", "60"])
    one = Pulse(store, 0, {0: ("here", os.getpid()), 1: ("here", child.pid), 2: ("there", 1)}, timeout_s=0.1)
    until(lambda: one.dead([1, 2]) == {2})
    one.forget({1, 2})
    assert one.dead([1, 2]) == set()
    one.close()
    child.kill()
    child.wait()
    assert open_descriptors() == before
