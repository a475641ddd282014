from __future__ import annotations

from commlayer.tools.probe.path import PHASES, Effort
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
    task = next(each for tasks in Plan(hosts(2, 2), Effort(), 8).first_pass() for each in tasks if each["driver"] == 1)
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
    assert [set(each) for each in found[1:]] == [lossy]


def test_where_two_paths_of_an_interface_lose_all_are_looked_at_again() -> None:
    samples = view(4).samples
    suspects = {Way(0, "eth0", 2, "eth0"), Way(1, "eth0", 2, "eth0")}
    passes = Plan(hosts(4), Effort(), 8).second_pass({"loss": suspects}, samples)
    found = {Way(*about["way"]) for tasks in passes for task in tasks for about in task["paths"]}
    assert found == {way for way in view(4).tested if way.target == 2}


def test_many_suspects_are_looked_at_side_by_side() -> None:
    samples = view(9).samples
    passes = Plan(hosts(9), Effort(), 8).second_pass({"rate": {each.way for each in samples}}, samples)
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
