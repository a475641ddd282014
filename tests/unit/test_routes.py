"""The paths of an engine: the merge of the two engines' figures, and the addresses."""

from typing import Any

from commlayer.transport.paths import Path
from commlayer.transport.ports import Ports
from commlayer.transport.routes import SUMMED, WORST, Routes, merge
from commlayer.transport.status import ffi

OF_THE_FIRST = {"round_trip_us", "port", "is_answered", "heard_us", "datagram_bytes"}


def test_counters_of_both_engines_are_sums_and_estimates_are_the_worst() -> None:
    names = [name for name, _ in ffi.typeof("struct cl_path_stats").fields]
    assert {*SUMMED, *WORST, *OF_THE_FIRST} == set(names)
    one, other = ffi.new("struct cl_path_stats *"), ffi.new("struct cl_path_stats *")
    for number, name in enumerate(names):
        setattr(one, name, 100 + number)
        setattr(other, name, 200 - number)
    one.queue_us = 300
    merge(one, other)
    assert {getattr(one, name) for name in SUMMED} == {300}
    assert (one.queue_us, one.is_dead) == (300, other.is_dead)
    assert all(getattr(one, name) == 100 + names.index(name) for name in OF_THE_FIRST)


class Nobody:
    """An engine that is not asked."""


def routes(engine: Nobody) -> Routes:
    shape = {"prefix": 24, "mtu": 1500, "loopback": False, "running": True, "version": 4, "port": 5}
    ports = Ports([{"ifname": f"eth{nic}", "address": f"10.0.{nic}.1", **shape} for nic in range(2)], 1)
    own: Any = engine
    return Routes(own, ports)


def test_a_known_peer_may_have_new_addresses_on_the_paths_that_it_has() -> None:
    engine = Nobody()
    found = routes(engine)
    found.note(7, [Path(0, "10.0.0.2", 9), Path(1, "2001:db8::2", 9)])
    found.note(3, [Path(0, "10.0.0.3", 9)])
    assert found.peers() == [3, 7]
    found.note(7, [Path(0, "10.0.0.8", 8), Path(0, "10.0.0.9", 8), Path(1, "10.0.1.9", 8)])
    assert [found.remote(7, number) for number in range(3)] == ["10.0.0.8:8", "[2001:db8::2]:9", ""]
    assert found.remote(5, 0) == ""


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    engine = Nobody()
    found = routes(engine)
    assert found._lock.acquire(blocking=False)
    found.disown()
    assert found.peers() == []
