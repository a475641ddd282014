"""The ranks with which a rank tries packets at the start."""

import pytest

from commlayer.transport.reach import ALL_HOSTS_MAX, ranks_to_try


def hosts_of(count: int, per_host: int) -> list[list[int]]:
    return [list(range(host * per_host, (host + 1) * per_host)) for host in range(count)]


def test_ranks_of_one_host_try_nothing() -> None:
    assert ranks_to_try([(0, 1, 2)], 1) == []


def test_ranks_of_few_hosts_try_all_others() -> None:
    assert ranks_to_try([(0, 2), (1, 3), (4,)], 3) == [0, 2, 4]
    assert len(ranks_to_try(hosts_of(ALL_HOSTS_MAX, 2), 5)) == 2 * (ALL_HOSTS_MAX - 1)


@pytest.mark.parametrize("count", [ALL_HOSTS_MAX + 1, 100, 128, 1000])
def test_ranks_of_many_hosts_try_a_few_which_try_them(count: int) -> None:
    hosts = hosts_of(count, 3)
    tried = {rank: ranks_to_try(hosts, rank) for ranks in hosts for rank in ranks}
    for rank, others in tried.items():
        assert len(set(others)) == len(others) <= 2 * count.bit_length()
        assert all(other // 3 != rank // 3 and rank in tried[other] for other in others)
    assert {other // 3 for other in tried[0]} >= {1, 2, 4, 32, count - 1, count - 32}


def test_hosts_may_have_different_numbers_of_ranks() -> None:
    hosts = [list(range(4)), *([rank] for rank in range(4, 4 + ALL_HOSTS_MAX))]
    assert all(other >= 4 for rank in range(4) for other in ranks_to_try(hosts, rank))
    assert 0 in ranks_to_try(hosts, 4)
