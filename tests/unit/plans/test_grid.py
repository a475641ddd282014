from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.plans import direct, grid, hierarchical, select
from commlayer.plans.hierarchical import Hosts
from commlayer.plans.plan import Plan, StepKind
from commlayer.plans.settings import Settings
from tests.unit.plans.conformance import TENSORS, barrier_holds, conform, conform_all


@settings(max_examples=120)
@given(
    n=st.integers(2, 20),
    numel=st.integers(0, 300),
    exchange_limit_bytes=st.sampled_from((0, 200, 1 << 20)),
    **TENSORS,
)
def test_any_shape(n: int, numel: int, exchange_limit_bytes: int, **tensors: Any) -> None:
    conform_all(grid, n, numel, Settings(exchange_limit_bytes=exchange_limit_bytes), **tensors)


@pytest.mark.parametrize("n", [4, 7, 12])
def test_long_broadcasts(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads of the rows, and then the members of each, share the work."""
    monkeypatch.setattr(direct, "SCATTER_LIMIT_BYTES", 100)
    for root in range(n):

        def make(rank: int, root: int = root) -> Plan:
            return grid.broadcast(rank, n, 700, 8, root, Settings())

        conform("broadcast", make, n, 700, root=root)


@pytest.mark.parametrize("n", range(2, 15))
def test_barrier(n: int) -> None:
    barrier_holds(lambda r: grid.barrier(r, n), n)


@pytest.mark.parametrize("n", range(2, 200))
def test_rows_and_columns_are_about_equally_long(n: int) -> None:
    rows = grid.rows_of(range(n))
    assert [member for row in rows for member in row] == list(range(n))
    lengths = {len(row) for row in rows}
    assert max(lengths) - min(lengths) <= 1
    assert len(rows) <= min(lengths) <= len(rows) + 2


@settings(max_examples=60)
@given(
    hosts=st.sampled_from((((0, 1), (2,), (3, 4)), ((0,), (1, 2), (3,), (4, 5, 6), (7, 8)), ((0, 2), (1, 3)))),
    numel=st.integers(0, 1009),
    choices=st.fixed_dictionaries(
        {
            "segment_bytes": st.integers(100, 900),
            "staging_bytes": st.sampled_from((512, 1000, 4096)),
            "exchange_limit_bytes": st.sampled_from((0, 500, 1 << 20)),
        }
    ),
    **TENSORS,
)
def test_between_hosts_of_several_ranks(hosts: Hosts, numel: int, choices: dict[str, Any], **tensors: Any) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grid, "MEMBERS_LEAST", 2)
        conform_all(hierarchical, hosts, numel, Settings(**choices), **tensors)
        barrier_holds(lambda r: hierarchical.barrier(r, hosts), sum(map(len, hosts)))


def _plan(name: Any, n: int, length: int, rank: int = 3, **options: Any) -> Plan:
    hosts = tuple((rank,) for rank in range(n))
    return select.plan_for(name, rank=rank, hosts=hosts, numel=length, itemsize=1, settings=Settings(**options))


def _sends(plan: Plan) -> int:
    return int((plan.steps["kind"] == StepKind.SEND).sum())


def test_short_messages_of_large_worlds_use_a_grid() -> None:
    """1,000 hosts stand in 31 rows of 32 or 33."""
    for name in ("all_reduce", "broadcast", "barrier"):
        for rank in (0, 31, 32, 999):
            assert _sends(_plan(name, 1000, 500, rank)) <= 31 + 33
            assert _sends(_plan(name, 1000, 900_000, rank)) <= 2 * (31 + 33)
    assert _sends(_plan("all_reduce", 1000, 500)) == _sends(_plan("barrier", 1000, 0))
    assert _sends(_plan("all_reduce", 128, 4)) == 127
    assert _sends(_plan("all_reduce", 129, 4)) < 30
    for length in (129 * grid.PART_BYTES, 129 * grid.PART_BYTES - 1):
        assert (_sends(_plan("all_reduce", 129, length)) < 100) == (length < 129 * grid.PART_BYTES)


def test_a_long_message_of_a_grid_carries_no_more_than_by_direct() -> None:
    length = 1 << 19
    for n in (130, 144, 1000):
        sent = []
        for rank in (0, n // 2, n - 1):
            steps = _plan("all_reduce", n, length, rank).steps
            sent.append(int(steps["length"][steps["kind"] == StepKind.SEND].sum()))
        assert max(sent) < 1.15 * 2 * length * (n - 1) / n, n


@pytest.mark.parametrize("options", [{"deterministic": True}, {"algorithm": "direct"}, {"partial": True}], ids=str)
def test_who_asks_for_another_sum_gets_it(options: dict[str, Any]) -> None:
    """The order of the ranks, the owner of each shard, or contributions that may be lost."""
    length = 100 << 10
    assert _sends(_plan("all_reduce", 200, length)) < 60
    assert _sends(_plan("all_reduce", 200, length, **options)) >= 199


@pytest.mark.parametrize("hosts", [((0,), (1,), (2,), (3,), (4,)), ((0, 1), (2, 3), (4, 5))], ids=str)
@pytest.mark.parametrize("numel", [1, 100, 5000])
def test_a_deterministic_sum_has_the_same_plan_with_and_without_grids(hosts: Hosts, numel: int) -> None:
    def steps(deterministic: bool) -> list[list[tuple[Any, ...]]]:
        s = Settings(deterministic=deterministic)
        make = select.make_plan
        return [
            make("all_reduce", rank=rank, hosts=hosts, numel=numel, itemsize=4, settings=s).steps.tolist()
            for rank in range(sum(map(len, hosts)))
        ]

    without = [steps(deterministic) for deterministic in (True, False)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grid, "MEMBERS_LEAST", 2)
        ordered, other = (steps(deterministic) for deterministic in (True, False))
    assert ordered == without[0]
    assert (other != without[1]) == (len(hosts) * grid.PART_BYTES > 4 * numel)
