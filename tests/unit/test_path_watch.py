"""The watch of the paths: deaths, returns and rates, from the engine's counters."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from commlayer.transport import path_watch as module
from commlayer.transport.flight import Recorder
from commlayer.transport.native import Report
from commlayer.transport.path_watch import Uplinks, Watch
from tests.unit.test_diagnosis import descriptions

ALIVE = {"deaths": 0, "is_dead": 0, "round_trip_us": 0, "window_bytes": 0, "queue_us": 0}
ALIVE |= {"packets_sent": 0, "packets_lost": 0, "datagram_bytes": 1472}
ALIVE |= {"capacity_bytes": 1, "carried_bytes": 0}


class FakeEngine:
    """Its paths, by peer."""

    found: dict[int, list[dict[str, Any]]]

    @classmethod
    def shared_report(cls) -> Report:
        return Report({}, {}, cls.found)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(module, "recorder", made)
    return made


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recorder: Recorder) -> Iterator[Watch]:
    """A watch of two paths to rank 5, which looks when the test says so."""
    monkeypatch.setattr(module, "Engine", FakeEngine)
    monkeypatch.setattr(module, "PERIOD_S", 1000.0)
    ends = [{"interface": f"eth{number}", "address": f"10.0.{number}.1", "port": 20001} for number in range(2)]
    FakeEngine.found = {5: [{**ALIVE, **end} for end in ends]}
    caplog.set_level(logging.INFO, "commlayer")
    made = Watch()
    own, peer = descriptions(1, one_host=False)
    made.add(own, [own, peer, {**peer, "peer": 6}])  # no path is known to rank 6
    yield made
    made.close()


def told(watch: Watch, caplog: pytest.LogCaptureFixture, **changed: int) -> list[str]:
    """The lines of the next look, after a change of the second path."""
    FakeEngine.found[5][1] |= changed
    caplog.clear()
    watch.look()
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


PATH = "path eth1 to rank 5 on node1 (10.0.1.2 port 20001)"


def test_death_and_return(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    assert told(watch, caplog) == []
    assert told(watch, caplog, deaths=1, is_dead=1) == [
        f"WARNING {PATH} died: it loses all packets; others carry its load"
    ]
    assert told(watch, caplog) == []
    assert told(watch, caplog, is_dead=0) == [f"INFO {PATH} delivers again"]
    assert told(watch, caplog) == []


def test_a_short_death_is_not_missed(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    assert told(watch, caplog, deaths=2) == [f"WARNING {PATH} died 2 times, and delivers again"]
    assert told(watch, caplog, deaths=3) == [f"WARNING {PATH} died once, and delivers again"]


def test_the_flight_record_has_the_readings(watch: Watch, recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    told(watch, caplog, packets_sent=7)
    told(watch, caplog, packets_sent=9, round_trip_us=120)
    found = [entry for entry in recorder.dump("test")["paths"] if entry["name"] == PATH.removeprefix("path ")]
    assert [entry["packets_sent"] for entry in found] == [7, 9]
    assert found[1]["round_trip_us"] == 120
    assert found[0]["time_ns"] <= found[1]["time_ns"]


def test_full_links_are_found(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    assert told(watch, caplog) == []
    assert told(watch, caplog, carried_bytes=1 << 40) == []
    link = watch.uplinks.fullest()
    assert link is not None
    assert link.interface == "eth1"
    assert link.full_s > 0


def test_rates_are_told_at_debug_when_they_have_doubled(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    assert told(watch, caplog, window_bytes=10_000, round_trip_us=100) == []
    caplog.set_level(logging.DEBUG, "commlayer")
    rate = f"DEBUG {PATH} may send 100 MB/s: window 10000 bytes, round trip 100 us, of it 0 us in queues"
    assert told(watch, caplog) == [rate]
    assert told(watch, caplog, window_bytes=15_000) == []
    assert len(told(watch, caplog, window_bytes=20_000)) == 1
    assert len(told(watch, caplog, window_bytes=10_000)) == 1


def test_the_thread_looks_by_itself(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(module, "PERIOD_S", 0.01)

    def look(self: Watch) -> None:
        looked.append(self)
        raise ValueError("as the test wants it")

    monkeypatch.setattr(Watch, "look", look)
    made = Watch()
    made._thread.join(10.0)
    assert looked == [made]
    assert "the watch of the paths has ended" in caplog.text
    made.close()


SECOND_BYTES = 1_000_000


def path(carried_bytes: int, port: int = 20001, capacity_bytes: int = SECOND_BYTES) -> dict[str, Any]:
    ends = {"interface": f"eth{port - 20001}", "address": "10.0.0.1", "port": port}
    return {**ends, "carried_bytes": carried_bytes, "capacity_bytes": capacity_bytes}


def test_time_counts_while_the_link_is_nearly_full() -> None:
    links = Uplinks()
    for now_s, carried_bytes in ((10.0, 5_000_000), (10.5, 5_450_000), (11.0, 5_500_000), (12.0, 6_400_000)):
        links.read([path(carried_bytes), path(carried_bytes)], now_s)  # two peers
    link = links.fullest()
    assert link is not None
    assert (link.interface, link.full_s, link.full_bytes) == ("eth0", 1.5, 1_350_000)
    assert link.rate_bytes == 900_000


def test_the_fullest_link_is_told() -> None:
    links = Uplinks()
    assert links.fullest() is None
    for now_s, sent in ((0.0, 0), (1.0, 700_000), (2.0, 1_400_000)):
        links.read([path(sent // 2), path(sent, 20002)], now_s)
    link = links.fullest()
    assert link is not None
    assert (link.interface, link.full_s) == ("eth1", 2.0)


def test_a_link_without_a_measured_capacity_is_not_full() -> None:
    links = Uplinks()
    for now_s in (0.0, 1.0, 1.0):
        links.read([path(int(now_s) * 500_000, capacity_bytes=0)], now_s)
    link = links.fullest()
    assert link is not None
    assert (link.full_s, link.rate_bytes) == (0.0, 0.0)
