import pytest

from commlayer.tools.probe.schedule import PATHS_MAX, pairs, paths, rounds


@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 8, 9])
def test_small_jobs_measure_all_pairs_as_a_tournament(hosts: int) -> None:
    wanted = pairs(hosts)
    assert len(wanted) == hosts * (hosts - 1) // 2
    found = rounds(wanted, hosts)
    assert len(found) == hosts - 1 + hosts % 2
    assert sorted(pair for meetings in found for pair in meetings) == sorted(wanted)


@pytest.mark.parametrize("hosts", [10, 17, 64, 150, 1001])
@pytest.mark.parametrize("partners", [1, 2, 8])
def test_large_jobs_are_sparse_and_connected(hosts: int, partners: int) -> None:
    wanted = pairs(hosts, partners)
    degrees = [sum(host in pair for pair in wanted) for host in range(hosts)]
    assert min(degrees) >= 1
    assert max(degrees) <= max(2, partners)
    reached, edge = {0}, [0]
    neighbours: dict[int, set[int]] = {}
    for one, other in wanted:
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    while edge:
        new = neighbours[edge.pop()] - reached
        reached |= new
        edge += new
    assert len(reached) == hosts
    assert len(rounds(wanted, hosts)) <= 2 * max(degrees)


@pytest.mark.parametrize(("hosts", "partners"), [(7, 8), (40, 8)])
def test_no_host_is_in_two_measurements_at_once(hosts: int, partners: int) -> None:
    for meetings in rounds(pairs(hosts, partners), hosts):
        taken = [host for pair in meetings for host in pair]
        assert len(taken) == len(set(taken))


def nic(name: str, address: str, prefix: int = 24) -> dict[str, object]:
    return {"ifname": name, "address": address, "prefix": prefix}


def names(ones: list[dict[str, object]], others: list[dict[str, object]]) -> list[tuple[object, object, str]]:
    return [(one["ifname"], other["ifname"], network) for one, other, network in paths(ones, others)]


def test_every_two_interfaces_of_a_subnet_are_a_path() -> None:
    mine = [nic("a0", "10.0.0.1"), nic("a1", "10.0.0.2"), nic("b", "10.0.1.1")]
    theirs = [nic("x", "10.0.0.9"), nic("y", "10.0.1.9"), nic("z", "10.0.2.9")]
    assert names(mine, theirs) == [
        ("a0", "x", "10.0.0.0/24"),
        ("a1", "x", "10.0.0.0/24"),
        ("b", "y", "10.0.1.0/24"),
    ]


def test_an_address_that_both_hosts_have_leads_nowhere() -> None:
    assert names([nic("d", "172.17.0.1", 16)], [nic("d", "172.17.0.1", 16), nic("e", "172.17.0.2", 16)]) == [
        ("d", "e", "172.17.0.0/16")
    ]


def test_routed_hosts_pair_their_interfaces_by_order() -> None:
    mine, theirs = [nic("a", "10.0.0.1"), nic("b", "fd00::1", 64)], [nic("x", "10.9.0.1"), nic("y", "fd09::1", 64)]
    assert names(mine, theirs) == [("a", "x", "routed"), ("b", "y", "routed")]


def test_a_pair_has_no_more_paths_than_the_engine_uses() -> None:
    many = [nic(f"a{number}", f"10.0.0.{number + 1}") for number in range(4)]
    others = [nic(f"b{number}", f"10.0.0.{number + 101}") for number in range(4)]
    assert len(paths(many, others)) == PATHS_MAX
