"""Places of pipelines on a cluster: speeds, memory, and the links that neighbours share."""

import math

import pytest

from commlayer.planner import Cluster, Layout, Link, Links, Rank
from commlayer.planner.place import Place, places

WITHIN, BETWEEN = Link(1e10, 1e-6), Link(1e9, 1e-4)


def of(*hosts: list[float], stages: int, outer: str = "stages", wraps: bool = False) -> tuple[Place, ...]:
    """The places on hosts of ranks of these speeds, with as many GiB."""
    cluster = Cluster([[Rank(speed, speed * 2**30) for speed in host] for host in hosts], Links(WITHIN, BETWEEN))
    layout = Layout(stages=stages, replicas=len(cluster.ranks) // stages, outer=outer)  # type: ignore[arg-type]
    return places(cluster, layout, wraps=wraps)


def test_the_slowest_of_a_position_counts() -> None:
    first, second = of([2.0, 4.0], [8.0, 1.0], stages=2)  # positions: ranks 0 and 1, ranks 2 and 3
    assert (first.speed, second.speed) == (1.0, 0.5)  # relative to rank 0
    assert (first.memory_bytes, second.memory_bytes) == (2 * 2**30, 2**30)


def test_pairs_that_leave_a_host_share_its_link() -> None:
    first, _ = of([1.0, 1.0], [1.0, 1.0], stages=2)
    assert first.send == Link(BETWEEN.rate_bps / 2, BETWEEN.latency_s)
    first, second = of([1.0, 1.0], [1.0, 1.0], stages=2, outer="replicas")
    assert first.send == WITHIN
    assert (first.host, second.host) == (0, 0)
    fan_in = of([1.0], [1.0], [1.0, 1.0], stages=2)  # ranks 0 and 1 send to 2 and 3, on one host
    assert fan_in[0].send.rate_bps == BETWEEN.rate_bps / 2


def test_with_several_chunks_the_last_sends_to_the_first() -> None:
    hosts = ([1.0, 1.0], [1.0, 1.0])
    assert of(*hosts, stages=4)[1].send.rate_bps == BETWEEN.rate_bps
    turns = of(*hosts, stages=4, wraps=True)
    assert [place.send for place in turns] == [WITHIN, BETWEEN, WITHIN, BETWEEN]
    assert [place.host for place in turns] == [0, 0, 1, 1]


def test_replicas_reduce_within_a_host_or_between() -> None:
    assert [place.reduce.rate_bps for place in of([1.0, 1.0], stages=2)] == [math.inf] * 2  # there are none
    (own,) = of([1.0, 1.0], stages=1)
    assert own.reduce.reduce_s(1000, 2) == pytest.approx(WITHIN.reduce_s(1000, 2))
    far = of([1.0, 1.0], [1.0, 1.0], stages=2, outer="replicas")
    assert far[0].reduce.rate_bps == pytest.approx(BETWEEN.rate_bps)  # two stages share the link, but in turns
    assert [place.leaves_host for place in (own, *far)] == [False, True, True]
