from types import SimpleNamespace
from typing import Any

import pytest

from commlayer.tools.probe.command import Spec, _lead
from commlayer.tools.probe.findings import of_addresses
from commlayer.tools.probe.meeting import Host, MeetingError
from commlayer.tools.probe.path import CROSSED, PHASES, Effort
from commlayer.tools.probe.plan import Plan
from commlayer.tools.probe.sample import Way
from tests.unit.probe.jobs import hosts
from tests.unit.probe.samples import view


def test_the_first_pass_measures_every_path_in_both_directions_once() -> None:
    passes = Plan(hosts(4, 2), Effort(), 8).first_pass()
    found = [Way(*about["way"]) for tasks in passes for task in tasks for about in task["paths"]]
    assert sorted(found) == sorted(view(4, 2).tested)
    assert len(passes) == 6  # three rounds, each in both directions
    for tasks in passes:
        busy = [host for task in tasks for host in (task["driver"], task["responder"])]
        assert len(busy) == len(set(busy))
        assert {tuple(about["phases"]) for task in tasks for about in task["paths"]} == {PHASES}


def test_paths_name_the_socket_here_and_the_address_there() -> None:
    task = next(
        given for tasks in Plan(hosts(2, 2), Effort(), 8).first_pass() for given in tasks if given["driver"] == 1
    )
    assert [(about["port"], about["to"], about["interface_mtu"]) for about in task["paths"]] == [
        (0, ["10.87.0.1", 4000], 1500),
        (1, ["10.87.1.1", 4000], 1500),
    ]


def test_the_second_pass_repeats_what_found_the_suspect() -> None:
    samples = view(4).samples
    slow, lossy = Way(0, "eth0", 3, "eth0"), Way(1, "eth0", 2, "eth0")
    passes = Plan(hosts(4), Effort(), 8).second_pass({"rate": {slow}, "loss": {slow, lossy}, "rtt": set()}, samples)
    found = {Way(*about["way"]): about for tasks in passes for task in tasks for about in task["paths"]}
    assert {way: about["phases"] for way, about in found.items()} == {slow: ["loss", "rate"], lossy: ["loss"]}
    assert (found[lossy]["rate_bps"], found[lossy]["mtu"]) == (100e6, 1500)
    assert [len(tasks) for tasks in passes] == [1, 1]


def test_rates_are_looked_at_again_when_nothing_else_goes_on() -> None:
    samples = view(4).samples
    slow, lossy = {Way(0, "eth0", 3, "eth0")}, {Way(0, "eth0", 1, "eth0"), Way(3, "eth0", 2, "eth0")}
    passes = Plan(hosts(4), Effort(), 8).second_pass({"rate": slow, "loss": lossy}, samples)
    found = [[Way(*about["way"]) for task in tasks for about in task["paths"]] for tasks in passes]
    assert found[0] == list(slow)
    assert [set(hosts_of) for hosts_of in found[1:]] == [lossy]


def test_where_two_paths_of_an_interface_lose_all_are_looked_at_again() -> None:
    samples = view(4).samples
    suspects = {Way(0, "eth0", 2, "eth0"), Way(1, "eth0", 2, "eth0")}
    passes = Plan(hosts(4), Effort(), 8).second_pass({"loss": suspects}, samples)
    found = {Way(*about["way"]) for tasks in passes for task in tasks for about in task["paths"]}
    assert found == {way for way in view(4).tested if way.target == 2}


def test_many_suspects_are_looked_at_side_by_side() -> None:
    samples = view(9).samples
    passes = Plan(hosts(9), Effort(), 8).second_pass({"rate": {sample.way for sample in samples}}, samples)
    assert sum(len(tasks) for tasks in passes) == 72
    for tasks in passes:
        busy = [host for task in tasks for host in (task["driver"], task["responder"])]
        assert len(busy) == len(set(busy))
    assert len(passes) <= 24  # 18 at best


def test_bytes_of_all_hosts_and_of_the_busiest() -> None:
    effort = Effort(burst_bytes=1_000_000)
    plan = Plan(hosts(3, 2), effort, 8)
    assert plan.bytes(plan.first_pass()) == (12 * effort.bytes, 4 * effort.bytes)


def test_a_slow_interface_gets_shorter_bursts() -> None:
    task = Plan(hosts(2, 1, speed_mbit_s=100), Effort(), 8).first_pass()[0][0]
    assert task["paths"][0]["effort"]["burst_bytes"] < 3_000_000


def test_all_hosts_send_at_once_to_the_neighbour_and_half_of_the_hosts_away() -> None:
    for count, distances in ((2, [1]), (3, [1]), (4, [1, 2]), (20, [1, 10])):
        found = Plan(hosts(count), Effort(), 8).crossed()
        assert [[(task["driver"], task["responder"]) for task in tasks] for tasks in found] == [
            [(host, (host + distance) % count) for host in range(count)] for distance in distances
        ]
        assert all(about["phases"] == [CROSSED] for tasks in found for task in tasks for about in task["paths"])


def test_only_paths_that_answered_are_crossed_with_their_figures() -> None:
    samples = view(3).samples
    samples[0].is_reached = False
    silent = samples[0].way
    (tasks,) = Plan(hosts(3), Effort(), 8).crossed(samples)
    assert [(task["driver"], task["responder"]) for task in tasks] == [
        ends for ends in ((0, 1), (1, 2), (2, 0)) if ends != (silent.source, silent.target)
    ]
    assert (tasks[0]["paths"][0]["rate_bps"], tasks[0]["paths"][0]["rtt_us"]) == (100e6, [200.0, 400.0])


def test_flows_are_looked_at_again_with_more_packets() -> None:
    samples = view(3).samples
    passes = Plan(hosts(3), Effort(train_packets=500), 8).second_pass({"links": {samples[0].way}}, samples)
    (about,) = [about for tasks in passes for task in tasks for about in task["paths"]]
    assert (about["phases"], about["effort"]["train_packets"]) == (["flows"], 2000)


def test_crossing_traffic_is_counted() -> None:
    effort = Effort(burst_bytes=1_000_000)
    plan = Plan(hosts(4), effort, 8)
    assert plan.bytes(plan.crossed()) == (8 * 2_000_000, 2 * 2_000_000)


def same_address(count: int, nics: int) -> list[Host]:
    """Hosts whose last interface has one address on all of them, as bridges of containers have."""
    found = hosts(count, nics)
    for host in found:
        host.nics[-1]["address"] = "172.17.0.1"
    return found


def test_an_address_that_several_hosts_have_is_named_and_in_no_path() -> None:
    plan = Plan(same_address(4, 2), Effort(), 8)
    abouts = [about for tasks in plan.first_pass() for task in tasks for about in task["paths"]]
    assert {Way(*about["way"]).target_nic for about in abouts} == {"eth0"}
    assert len(abouts) == 12
    (finding,) = of_addresses(plan.shared)
    assert finding.text == "host0, host1, host2 and host3 have the same address, 172.17.0.1 (eth1)"
    assert finding.remedy.endswith("leave the interface out with COMMLAYER_IFNAME=^eth1")
    assert of_addresses(Plan(hosts(4, 2), Effort(), 8).shared) == []


def test_hosts_of_one_address_alone_are_an_error_that_names_it() -> None:
    meeting: Any = SimpleNamespace(hosts=same_address(4, 1), size=4)
    with pytest.raises(MeetingError, match=r"host0, host1, host2 and host3 have the same address, 172.17.0.1 \(eth0\)"):
        _lead(meeting, Spec(), lambda _: None)
