from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from commlayer.telemetry.sample import PATHS_TOLD, PEERS_READ, PathReading, Reading, Sampler, between, flows, in_steps
from commlayer.transport.lags import Lag
from commlayer.transport.native import Engine


def reading(at_s: float, **more: Any) -> Reading:
    return Reading(at_s, more.pop("stats", {}), more.pop("lags", {}), more.pop("paths", {}), **more)


def path(sent: int = 0, lost: int = 0, *, port: int = 0, queue_us: int = 0, is_dead: bool = False) -> PathReading:
    return PathReading(port, sent, lost, sent, queue_us, 100, is_dead)


def test_rates_are_of_the_time_between_two_readings() -> None:
    before = reading(10, stats={"payload_bytes_sent": 1000, "packets_sent": 10}, steps=5, exposed_s=1.0, late_s=0.5)
    stats = {"payload_bytes_sent": 5000, "packets_sent": 50, "packets_lost": 6, "packets_spurious": 2}
    stats |= {"packets_retransmitted": 3, "packets_given_up": 2}
    found = between(before, reading(12, stats=stats, packet_bytes=1400, steps=9, exposed_s=1.4, late_s=0.75))
    assert (found["sent_bytes_s"], found["packets"], found["lost"], found["retransmitted"]) == (2000, 40, 4, 3)
    assert (found["forgiven_bytes"], found["steps"], found["exposed_s"], found["late_s"]) == (2800, 4, 0.4, 0.25)


def test_a_closed_engine_and_no_step_give_no_rates() -> None:
    found = {**between(reading(10), reading(11)), **in_steps(reading(10), reading(11))}
    assert (found["step_s"], found["packets"], found["queue_us"], found["lags"]) == (None, 0, 0, [])


def test_the_peers_with_the_longest_waits_are_named() -> None:
    before = reading(1, lags={1: Lag(5, 100), 2: Lag(1, 50)})
    now = reading(2, lags={1: Lag(6, 130), 2: Lag(1, 50), **{rank: Lag(1, rank) for rank in range(3, 9)}})
    assert in_steps(before, now)["lags"] == [[1, 30], [8, 8], [7, 7], [6, 6]]


def test_a_sample_has_the_steps_that_ended_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of 1.5 s, some samples have none of their own."""
    counts = iter([0, 0, 1, 2, 2, 3])  # one reading at the start, one per sample
    at_s = iter(range(10))

    def read(_: Sampler) -> Reading:
        steps = next(counts)
        at = {"stepped_s": 1.5 * steps, "exposed_in_steps_s": 0.6 * steps, "late_in_steps_s": 0.3 * steps}
        return reading(float(next(at_s)), steps=steps, lags={1: Lag(steps, 300_000 * steps)}, **at)

    monkeypatch.setattr(Sampler, "_read", read)
    sampler = Sampler(0, 2)
    found = [sampler.take() for _ in range(5)]
    assert [sample["steps"] for sample in found] == [0, 1, 1, 0, 1]
    names = ("step_s", "exposed_step_s", "late_step_s")
    assert [tuple(sample[name] for name in names) for sample in found] == [(None,) * 3, *[(1.5, 0.6, 0.3)] * 4]
    assert [(sample["lags"], sample["lags_s"]) for sample in found][2:] == [
        *[([[1, 300_000]], 1.0)] * 2,
        ([[1, 300_000]], 2.0),
    ]


def test_of_many_paths_those_that_stand_out_are_told() -> None:
    before = reading(1, paths={(peer, 0): path(100) for peer in range(100)})
    now = {(peer, 0): path(200, port=peer % 2) for peer in range(100)}
    now |= {(70, 0): path(200, is_dead=True), (50, 0): path(200, 30), (60, 0): path(200, queue_us=9000)}
    ports, told = flows(before, reading(2, paths=now))
    assert len(told) == PATHS_TOLD
    assert {(70, 0), (50, 0), (60, 0)} <= set(told)
    assert list(told) == sorted(told)
    assert (told[50, 0].lost, told[50, 0].sent) == (30, 100)
    assert sum(port.sent for port in ports.values()) == 100 * 100
    assert (ports[0].dead, ports[0].lost, ports[0].queue_us) == (1, 30, 9000)


class ManyPeers:
    """An engine with more peers than a sample reads. Reading it needs the guard that keeps it open."""

    packet_bytes = 1400

    def __init__(self) -> None:
        self.lags = self.ports = self.routes = self
        self.paused: set[str] = set()
        self.asked: list[int] = []

    def peers(self) -> list[int]:
        return list(range(PEERS_READ + 100))

    def counters(self, peers: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        assert Engine._guard.locked()
        for peer in peers:
            self.asked.append(peer)
            counts = {"packets_sent": len(self.asked), "packets_lost": 0, "packets_received": 0}
            yield peer, 0, SimpleNamespace(port=0, queue_us=0, round_trip_us=0, is_dead=0, **counts)

    def stats(self) -> dict[str, int]:
        assert Engine._guard.locked()
        return {"packets_sent": len(self.asked)}

    def read(self) -> dict[int, Lag]:
        return {}

    def names(self) -> list[str]:
        return ["eth0"]

    def remote(self, peer: int, path: int) -> str:
        return f"{peer}/{path}"


def test_paths_to_many_peers_are_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = ManyPeers()
    monkeypatch.setattr(Engine, "_shared", engine)
    sampler = Sampler(0, PEERS_READ + 101)
    assert len(engine.asked) == PEERS_READ
    assert sampler.take()["packets"] == PEERS_READ
    assert set(engine.asked) == set(engine.peers())
    assert not Engine._guard.locked()
