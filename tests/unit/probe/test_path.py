import dataclasses

import pytest

from commlayer.tools.probe.packets import PING, Arrival, Sent
from commlayer.tools.probe.path import DSCP, ECN, PHASES, Effort, _is_own_limit
from commlayer.tools.probe.sample import Sample
from commlayer.tools.probe.train import Summary
from tests.unit.probe.loopback import QUICK, Filter, lossy, measurement


def measured(filtered: Filter, phases: tuple[str, ...]) -> Sample:
    with measurement(filtered) as each:
        each.sample.rate_bps = 50e6  # known, for phases without the rate
        return each.measure(phases)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_good_path(address: str) -> None:
    with measurement(address=address) as each:
        sample = each.measure(PHASES)
    assert sample.is_reached
    assert sample.rate_bps > 1e6
    assert 0 < sample.rtt_us[0] <= sample.rtt_us[1] <= sample.loaded_rtt_us[1] * 1000
    assert (sample.lost, sample.bursts, sample.mtu) == (0, 0, 1500)
    assert 20 <= sample.sent <= QUICK.train_packets
    assert sample.dscp == {str(code): code for code in DSCP}
    assert sample.ecn == {str(bits): bits for bits in ECN}


def test_lost_packets_are_counted_by_bursts() -> None:
    sample = measured(lossy({5, 6, 7, 50, 120, 121}), ("loss",))
    assert sample.is_reached
    assert (sample.lost, sample.bursts) == (6, 3)
    assert sample.burst_packets == 2


def test_a_smaller_mtu_on_the_way_is_found() -> None:
    def narrow(arrival: Arrival) -> Arrival | None:
        return None if arrival.size + 28 > 1377 else arrival

    assert measured(narrow, ("mtu",)).mtu == 1377


def test_bleached_dscp_and_ecn() -> None:
    dscp = measured(lambda arrival: arrival._replace(tos=arrival.tos & 3), ("tos",))
    assert set(dscp.dscp.values()) == {0}
    assert dscp.ecn == {"2": 2, "3": 3}
    ecn = measured(lambda arrival: arrival._replace(tos=arrival.tos & ~3), ("tos",))
    assert ecn.dscp == {str(code): code for code in DSCP}
    assert ecn.ecn == {"2": 0, "3": 0}


def test_a_class_that_is_dropped() -> None:
    sample = measured(lambda arrival: None if arrival.tos >> 2 == 46 else arrival, ("tos",))
    assert sample.dscp["46"] is None
    assert sample.dscp["34"] == 34


def test_a_path_without_answer_ends_soon_and_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlayer.tools.probe.path.PATIENCE_S", 0.1)
    sample = measured(lambda arrival: None if arrival.kind == PING else arrival, PHASES)
    assert not sample.is_reached
    assert (sample.sent, sample.dscp, sample.rtt_us) == (0, {}, [])


SUMMARY = Summary(1000, 0, 0, 0, 0, 100e6, 0.0, 0.0)
OFFERED = Sent(1000, 0.1, 0.0)  # packets of 1250 bytes: 100 Mbit/s


@pytest.mark.parametrize(
    ("sent", "changes", "is_own"),
    [
        (OFFERED, {}, True),
        (dataclasses.replace(OFFERED, blocked_s=0.05), {}, False),  # the interface was full
        (OFFERED, {"lost": 50}, False),
        (OFFERED, {"rate_bps": 50e6}, False),  # a queue stretched the burst
        (OFFERED, {"lost": 50, "overflowed": 50}, True),  # the probe could not keep up
    ],
)
def test_the_bottleneck_is_the_probe_or_the_network(sent: Sent, changes: dict[str, float], is_own: bool) -> None:
    assert _is_own_limit(sent, dataclasses.replace(SUMMARY, **changes), 1250) is is_own  # type: ignore[arg-type]


def test_the_announced_bytes_cover_what_is_sent() -> None:
    effort = Effort(burst_bytes=1_000_000, bursts=2, train_packets=1000)
    assert effort.bytes >= 2 * 1_000_000 + 1000 * 1500
