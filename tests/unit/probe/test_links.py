from collections.abc import Mapping

import pytest

from commlayer.tools.probe.flow import Flow
from commlayer.tools.probe.links import at_least, lossy, notes, routes, rtt_groups
from commlayer.tools.probe.sample import Sample, Way
from tests.unit.probe.samples import sample


def flows(*changes: Mapping[str, object], count: int = 8) -> list[Flow]:
    """Flows without losses; each of `changes` is that of one flow."""
    found = [Flow(4000 + number, rtt_us=200.0 + number, sent=1000, rate_bps=12.5e6) for number in range(count)]
    for flow, change in zip(found, changes, strict=False):
        for name, value in change.items():
            setattr(flow, name, value)
    return found


def path(some: list[Flow], rate_bps: float = 100e6) -> Sample:
    found = sample(Way(0, "eth0", 1, "eth0"))
    found.flows, found.flows_rate_bps = some, rate_bps
    return found


def test_one_link_has_no_groups() -> None:
    assert len(rtt_groups(flows())) == 1
    assert lossy(flows()) == []
    assert at_least(path(flows())) == 1
    assert notes([path(flows())]) == []


def test_round_trips_that_are_apart_are_groups() -> None:
    groups = rtt_groups(flows({"rtt_us": 5200.0}, {}, {"rtt_us": 5300.0}, {"rtt_us": 0.0}))
    assert [[flow.port for flow in group] for group in groups] == [[4001, 4004, 4005, 4006, 4007], [4000, 4002]]


@pytest.mark.parametrize("count", [4, 8, 16])
def test_the_flows_over_a_bad_link_are_found(count: int) -> None:
    bad = [{"lost": 20, "bursts": 12}] * (count // 4)
    assert [flow.port for flow in lossy(flows(*bad, count=count))] == [4000 + number for number in range(count // 4)]


def test_losses_of_all_flows_alike_are_no_fault_of_a_link() -> None:
    alike = [{"lost": lost, "bursts": lost} for lost in (5, 3, 7, 4, 6, 2, 5, 8)]
    assert lossy(flows(*alike)) == []


def test_few_losses_are_looked_at_again() -> None:
    few = flows({"lost": 3, "bursts": 3}, {"lost": 1, "bursts": 1})
    assert lossy(few) == []
    assert lossy(few, is_loose=True) == few[:2]


def test_one_long_burst_of_losses_proves_nothing() -> None:
    assert lossy(flows({"lost": 40, "bursts": 1}), is_loose=True) == []


def test_routes_are_told_apart() -> None:
    some = flows({"route": ["10.0.0.1", "10.1.0.1"]}, {"route": ["10.0.0.2", "10.1.0.1"]}, {"route": ["10.0.0.1"]})
    assert routes(some) == [("10.0.0.1",), ("10.0.0.1", "10.1.0.1"), ("10.0.0.2", "10.1.0.1")]


def test_more_ports_are_advised_where_they_carry_more() -> None:
    (note,) = notes([path(flows(), rate_bps=195e6)])
    assert note == (
        "the network chooses among at least 2 links by source port, for the path; 8 ports carry 195 Mbit/s, one "
        "100 Mbit/s: set COMMLAYER_PORTS=4"
    )


def test_more_ports_are_not_advised_where_they_carry_no_more() -> None:
    (note,) = notes([path(flows({"route": ["10.0.0.1"]}, {"route": ["10.0.0.2"], "rtt_us": 2000.0}))])
    assert note == (
        "the network chooses among at least 2 links by source port, for the path (2 routes, by 10.0.0.1, 10.0.0.2); "
        "round trips of 204 us and 2 ms; several ports carry no more than one, so leave COMMLAYER_PORTS at 1"
    )


def test_a_rate_that_the_probe_limits_says_nothing_of_links() -> None:
    some = path(flows(), rate_bps=195e6)
    some.is_own_limit = True
    assert notes([some]) == []
    slow = path(flows({"rtt_us": 2000.0}), rate_bps=50e6)
    (note,) = notes([slow])
    assert note.endswith("; round trips of 204 us and 2 ms")
