from commlayer.tools.probe.sample import Way
from commlayer.tools.probe.subject import Subject, explain
from tests.unit.probe.samples import view


def subjects(bad: set[Way], hosts: int, nics: int = 1) -> list[Subject]:
    return [subject for subject, _ in explain(bad, view(hosts, nics).tested)]


def ways(hosts: int, nics: int = 1) -> set[Way]:
    return set(view(hosts, nics).tested)


def test_nothing_bad_has_no_subject() -> None:
    assert subjects(set(), 4) == []


def test_a_host_that_receives_badly() -> None:
    bad = {way for way in ways(4) if way.target == 2}
    assert subjects(bad, 4) == [Subject("host", "receiving", 2, "eth0")]


def test_a_host_that_sends_badly_on_one_of_its_interfaces() -> None:
    bad = {way for way in ways(4, 2) if way.source == 1 and way.source_nic == "eth1"}
    assert subjects(bad, 4, 2) == [Subject("host", "sending", 1, "eth1")]


def test_a_host_in_both_directions_on_all_its_interfaces() -> None:
    bad = {way for way in ways(4, 2) if 3 in (way.source, way.target)}
    assert subjects(bad, 4, 2) == [Subject("host", "both", 3, None)]


def test_a_host_that_a_short_measurement_missed_once() -> None:
    bad = {way for way in ways(4) if way.target == 2 and way.source != 0}
    assert subjects(bad, 4) == [Subject("host", "receiving", 2, "eth0")]


def test_two_hosts_at_once() -> None:
    bad = {way for way in ways(5) if {1, 3} & {way.source, way.target}}
    found = subjects(bad, 5)
    assert {(finding.kind, finding.host) for finding in found} == {("host", 1), ("host", 3)}


def test_one_path_among_many_is_that_path() -> None:
    way = Way(0, "eth0", 2, "eth0")
    assert subjects({way}, 4) == [Subject("path", "sending", way=way)]
    assert subjects({way, way.back}, 4) == [Subject("path", "both", way=way)]


def test_of_two_hosts_neither_is_named() -> None:
    way = Way(0, "eth0", 1, "eth0")
    assert subjects({way.back}, 2) == [Subject("path", "sending", way=way.back)]
    assert subjects(ways(2), 2) == [Subject("path", "both", way=way)]
    assert subjects(ways(2, 2), 2, 2) == [Subject("pair", "both", way=Way(0, "", 1, ""))]


def test_a_network_and_all_networks() -> None:
    bad = {way for way in ways(4, 2) if way.source_nic == "eth1"}
    assert subjects(bad, 4, 2) == [Subject("network", network="10.87.1.0/24")]
    assert subjects(ways(4, 2), 4, 2) == [Subject("all")]


def test_every_bad_path_is_explained_once() -> None:
    tested = view(6).tested
    bad = {way for number, way in enumerate(tested) if number % 3 == 0}
    explained = [way for _, hits in explain(bad, tested) for way in hits]
    assert sorted(explained) == sorted(bad)
