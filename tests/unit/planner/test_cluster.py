"""Loads of collectives on two classes of links, in numbers by hand."""

import pytest

from commlayer.errors import ConfigError
from commlayer.planner.cluster import Cluster, Links, Rank
from commlayer.planner.costs import Link
from commlayer.planner.exchange import Axis, Exchange, Kind, When

LINKS = Links(within=Link(80, 0.25), between=Link(8, 2.0))  # 10 bytes and 1 byte a second
RANK = Rank(1.0, 1.0)


def cluster(*counts: int) -> Cluster:
    return Cluster([[RANK] * count for count in counts], LINKS)


def load(of: Cluster, kind: Kind, axis: Axis, when: When = "forward", ranks: tuple[int, ...] = ()) -> tuple[float, ...]:
    found = of.load(Exchange(kind, axis, 0, when), ranks or tuple(range(len(of.ranks))))
    return found.within_bytes, found.between_bytes, found.latency_s


def test_one_rank_per_host_receives_what_the_formula_says() -> None:
    assert load(cluster(1, 1, 1, 1), "all_gather", Axis(4)) == (0, 0.75, 2)
    assert load(cluster(1, 1, 1, 1), "all_to_all", Axis(4)) == (0, 0.75, 2)


def test_ranks_of_one_host_use_its_links_only() -> None:
    assert load(cluster(4), "all_reduce", Axis(4)) == (0.75, 0, 0.25)
    assert load(cluster(2, 2), "reduce_scatter", Axis(2)) == (0.5, 0, 0.25)


def test_a_host_receives_each_byte_of_a_group_once() -> None:
    """Two hosts of two: half of the tensor comes from the other host, a quarter to each rank, which pass it on."""
    assert load(cluster(2, 2), "all_gather", Axis(4)) == (0.5, 0.5, 2.25)
    assert load(cluster(2, 2), "all_to_all", Axis(4)) == (0.25, 1.0, 2.25)  # half of what each of two ranks receives


def test_groups_of_one_host_share_its_link() -> None:
    assert load(cluster(2, 2), "all_gather", Axis(2, 2)) == (0, 1.0, 2)  # two groups, half a tensor each


def test_only_own_groups_count_for_the_latency() -> None:
    """Ranks 0 and 1 share a host, 2 and 3 do not."""
    hosts = cluster(2, 1, 1)
    assert load(hosts, "all_gather", Axis(2), ranks=(0, 1)) == (0.5, 0, 0.25)
    assert load(hosts, "all_gather", Axis(2), ranks=(2, 3)) == (0, 0.5, 2)


def test_unequal_hosts() -> None:
    """The host with one rank of three receives two thirds."""
    within, between, _ = load(cluster(2, 1), "all_gather", Axis(3))
    assert between == pytest.approx(2 / 3)
    assert within == pytest.approx(2 / 3 - 1 / 6)  # a rank of two has half of the third that comes from outside
    assert load(cluster(2, 1), "all_gather", Axis(3), ranks=(0, 1))[1] == pytest.approx(1 / 3)


def test_sends_between_stages() -> None:
    """Stages of two ranks each, one host for two stages: the first stage of a host gets its input from outside."""
    hosts, axis = cluster(4, 4), Axis(4, 2)
    assert load(hosts, "send", axis, "forward", (0, 1)) == (0, 0, 0)  # the first stage
    assert load(hosts, "send", axis, "forward", (2, 3)) == (1, 0, 0.25)
    assert load(hosts, "send", axis, "forward", (4, 5)) == (0, 2, 2)
    assert load(hosts, "send", axis, "backward", (2, 3)) == (0, 2, 2)


def test_seconds() -> None:
    found = cluster(2, 2).load(Exchange("all_gather", Axis(4), 40, "forward"), (0,))
    assert found.seconds(LINKS, 40) == pytest.approx(40 * 0.5 / 1 + 40 * 0.5 / 10)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_numbers_are_named(value: float) -> None:
    with pytest.raises(ConfigError, match=r"Rank\.speed_flops=.* is not valid; give a finite number above 0"):
        Rank(value, 1)
    with pytest.raises(ConfigError, match=r"Rank\.memory_bytes=.* is not valid"):
        Rank(1, value)


def test_hosts_without_ranks_are_named() -> None:
    with pytest.raises(ConfigError, match="hosts is empty"):
        Cluster([], LINKS)
    with pytest.raises(ConfigError, match=r"hosts\[1\] has no ranks"):
        Cluster([[RANK], []], LINKS)
