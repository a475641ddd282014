from collections.abc import Callable

import pytest

from commlayer.tools.probe.findings import find
from commlayer.tools.probe.flow import Flow
from commlayer.tools.probe.sample import Crossed, Sample
from commlayer.tools.probe.view import suspects
from tests.unit.probe.samples import lose, view

Fault = Callable[[Sample], None]


def texts(hosts: int, nics: int, fault: Fault) -> list[str]:
    return [finding.text for finding in find(view(hosts, nics, fault))]


def only(where: Callable[[Sample], bool], change: Fault) -> Fault:
    return lambda path: change(path) if where(path) else None


def to(host: int, nic: str = "eth") -> Callable[[Sample], bool]:
    return lambda path: path.way.target == host and path.way.target_nic.startswith(nic)


def at(host: int, nic: str = "eth") -> Callable[[Sample], bool]:
    return lambda path: host in (path.way.source, path.way.target) and path.way.target_nic.startswith(nic)


def rate(bps: float) -> Fault:
    return lambda path: setattr(path, "rate_bps", bps)


@pytest.mark.parametrize(("hosts", "nics"), [(2, 1), (3, 2), (4, 1), (9, 2)])
def test_a_network_without_faults_has_no_findings(hosts: int, nics: int) -> None:
    assert find(view(hosts, nics)) == []
    assert not any(suspects(view(hosts, nics), is_loose=True).values())


def test_three_faults_are_three_findings() -> None:
    def fault(each: Sample) -> None:
        only(at(3, "eth0"), rate(20e6))(each)
        only(to(2), lose)(each)
        only(to(1, "eth1"), lambda bad: bad.dscp.update(dict.fromkeys(bad.dscp, 0)))(each)

    assert texts(4, 2, fault) == [
        "eth0 of host3 sends and receives 20 Mbit/s, 5.0 times less than the median host (100 Mbit/s)",
        "host2 loses 2.0% of the packets it receives, in bursts of 4.0 packets, from all peers",
        "eth1 of host1 clears DSCP of the packets it receives",
    ]


def test_the_remedy_names_the_interfaces_to_look_at() -> None:
    one, several = (find(view(4, 2, only(to(2, nic), lose)))[0].remedy for nic in ("eth1", "eth"))
    assert one.startswith("look at eth1 of host2, its cable or its switch port")
    assert several.startswith("look at eth0 and eth1 of host2, their cables or switch ports")


@pytest.mark.parametrize("hosts", [3, 4, 5])
def test_one_slow_host_is_found_among_few(hosts: int) -> None:
    found = find(view(hosts, 1, only(at(0), rate(20e6))))
    assert [(finding.kind, finding.subject["host"]) for finding in found] == [("rate", 0)]


def test_two_slow_hosts_of_four() -> None:
    found = find(view(4, 1, only(lambda path: at(0)(path) or at(1)(path), rate(20e6))))
    assert {finding.subject["host"] for finding in found} == {0, 1}


def test_a_host_that_only_receives_slowly() -> None:
    assert texts(4, 1, only(to(3), rate(20e6))) == [
        "host3 receives 20 Mbit/s from all peers, 5.0 times less than the median host (100 Mbit/s)"
    ]


def test_between_two_hosts_the_slow_direction_is_found() -> None:
    assert texts(2, 1, only(to(1), rate(20e6))) == [
        "the path from host0 to host1 carries 20 Mbit/s, 5.0 times less than the median host (100 Mbit/s)"
    ]


def test_rates_that_the_probe_itself_limits_are_no_findings() -> None:
    def fault(each: Sample) -> None:
        only(to(3), rate(20e6))(each)
        each.is_own_limit = True

    assert texts(4, 1, fault) == []


def test_slower_networks_are_compared_with_themselves() -> None:
    assert texts(4, 2, only(lambda path: path.way.source_nic == "eth1", rate(20e6))) == []


def test_losses_one_by_one_on_the_way_out() -> None:
    def fault(each: Sample) -> None:
        if each.way.source == 1:
            lose(each, 0.013, 1)

    finding = find(view(4, 1, fault))[0]
    assert finding.text == "host1 loses 1.3% of the packets it sends, one by one, to all peers"
    assert "Policy(loss_bound=0.02)" in finding.remedy


def test_a_single_lost_packet_is_looked_at_again_and_no_finding() -> None:
    def fault(each: Sample) -> None:
        if each.way.target == 1:
            each.lost = each.bursts = 1

    assert texts(4, 1, fault) == []
    assert len(suspects(view(4, 1, fault), is_loose=True)["loss"]) == 3


def test_mtu_that_is_smaller_than_that_of_the_interfaces() -> None:
    finding = find(view(4, 1, only(to(2), lambda path: setattr(path, "mtu", 1400))))[0]
    assert finding.text == "host2: packets above 1400 bytes disappear, although the interfaces have an MTU of 1500"
    assert finding.remedy.startswith("set COMMLAYER_MTU=1400")


def test_ecn_that_is_cleared_everywhere() -> None:
    assert texts(4, 2, lambda path: path.ecn.update({"2": 0, "3": 0})) == ["every path clears ECN"]


def test_a_mark_on_an_ecn_capable_packet_is_no_fault() -> None:
    assert texts(4, 1, lambda path: path.ecn.update({"2": 3})) == []


def test_dscp_that_is_changed() -> None:
    assert texts(2, 1, only(to(1), lambda path: path.dscp.update({"46": 10}))) == [
        "the path from host0 to host1 changes DSCP: 46 to 10"
    ]


def test_packets_with_dscp_that_never_arrive() -> None:
    assert texts(3, 1, lambda path: path.dscp.update({"46": None})) == ["every path drops packets with a DSCP"]


def test_a_far_host() -> None:
    assert texts(4, 1, only(at(2), lambda path: setattr(path, "rtt_us", [20_200.0, 21_000.0]))) == [
        "host2: a round trip takes 20.2 ms, that of the median host 200 us"
    ]


def test_reordering() -> None:
    assert texts(4, 1, only(to(0), lambda path: setattr(path, "reordered", 200))) == [
        "host0: 10.0% of the packets are overtaken by later ones"
    ]


def test_a_host_behind_a_firewall() -> None:
    def fault(each: Sample) -> None:
        if 1 in (each.way.source, each.way.target):
            each.is_reached, each.sent = False, 0

    assert texts(4, 1, fault) == ["no UDP packet passes between host1 and all peers"]


def test_of_several_interfaces_that_with_the_fault_is_named() -> None:
    fault = only(lambda path: (path.way.source, path.way.target, path.way.source_nic) == (0, 1, "eth1"), rate(20e6))
    assert texts(2, 2, fault)[0].startswith("the path from eth1 of host0 to eth1 of host1 carries 20 Mbit/s")


def test_findings_as_plain_values() -> None:
    table = find(view(4, 1, only(to(2), lose)))[0].table
    assert table["kind"] == "loss"
    assert table["ways"][0] == {"source": 0, "source_nic": "eth0", "target": 2, "target_nic": "eth0"}


def test_a_bad_link_among_parallel_ones() -> None:
    def fault(each: Sample) -> None:
        each.flows = [Flow(4000 + number, 200.0, 1000, route=[f"10.0.0.{number % 2}"]) for number in range(8)]
        for flow in each.flows[1::2] if each.way == (0, "eth0", 1, "eth0") else ():
            flow.lost, flow.bursts = 30, 20

    (finding,) = find(view(4, 1, fault))
    assert finding.kind == "links"
    assert finding.text == (
        "the path from host0 to host1: 4 of 8 source ports lose 3.0% of their packets, all through 10.0.0.1, the "
        "others 0.0%: one of several parallel links loses packets"
    )
    assert "COMMLAYER_PORTS=4" in finding.remedy


def crossed(bps: float, *, is_own_limit: bool = False) -> Fault:
    return lambda path: setattr(path, "crossed", Crossed(bps, is_own_limit, [900.0, 4000.0], 1000, 50))


def test_links_that_hosts_share_are_one_finding() -> None:
    def fault(each: Sample) -> None:
        crossed(45e6 if abs(each.way.source - each.way.target) == 2 else 98e6)(each)

    (finding,) = find(view(4, 1, fault))
    assert (finding.kind, len(finding.ways)) == ("crossed", 4)
    assert finding.text == (
        "while all hosts send at once, 4 of 12 directions carry 45 Mbit/s, 2.2 times less than alone (100 Mbit/s), "
        "with round trips of 4 ms: host0 to host2, host1 to host3, host2 to host0 and 1 more"
    )


def test_a_crossing_that_the_probe_limits_is_no_finding() -> None:
    assert texts(4, 1, crossed(45e6, is_own_limit=True)) == []
    assert texts(4, 1, crossed(80e6)) == []
