"""The ranks of a group that stay agree on those that go, or all get the same error."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from commlayer.errors import CommError, PeerLostError
from commlayer.transport.exclusion import Exclusion
from commlayer.transport.members import Members

PATIENCE_S = 30.0


def ends_of(size: int, store: Any, dead: Collection[int] = ()) -> list[Exclusion]:
    return [
        Exclusion(store, Members("7", rank, [10 + number for number in range(size)]), lambda: dead)
        for rank in range(size)
    ]


def call(end: Exclusion, excluded: Collection[int], *, aborts: bool = False, timeout_s: float = PATIENCE_S) -> str:
    """ "" or the error, without the rank that raises it."""
    try:
        end.agree(excluded, aborts=aborts, timeout_s=timeout_s)
    except CommError as error:
        return f"{type(error).__name__} {str(error).partition('shrink_group: ')[2]}"
    return ""


def call_all(ends: Sequence[Exclusion], excluded: dict[int, Collection[int]], **options: Any) -> dict[int, str]:
    with ThreadPoolExecutor(len(ends)) as pool:
        found = {rank: pool.submit(call, ends[rank], ranks, **options) for rank, ranks in excluded.items()}
        return {rank: future.result() for rank, future in found.items()}


def test_ranks_that_agree_return_and_the_excluded_one_learns_it() -> None:
    ends = ends_of(4, HashStore())
    assert ends[2].farewell() == ""
    assert set(call_all(ends, dict.fromkeys([0, 1, 3], (2,))).values()) == {""}
    assert ends[0].farewell() == ""
    assert "rank(s) 10, 11, 13 have excluded this rank" in ends[2].farewell()
    assert "rank(s) 10, 11, 13 have excluded this rank" in call(ends[2], [0])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sets(st.integers(0, 3), max_size=2), st.booleans()), min_size=4, max_size=4))
def test_one_party_goes_on_or_none_and_nobody_hangs(asked: list[tuple[set[int], bool]]) -> None:
    ends = ends_of(4, HashStore())
    callers = [rank for rank, (ranks, _) in enumerate(asked) if rank not in ranks]
    with ThreadPoolExecutor(4) as pool:
        futures = {
            rank: pool.submit(call, ends[rank], asked[rank][0], aborts=asked[rank][1], timeout_s=0.5)
            for rank in callers
        }
        found = {rank: future.result(PATIENCE_S) for rank, future in futures.items()}
    went_on = [rank for rank, error in found.items() if not error]
    if went_on:
        assert len({(frozenset(ranks), aborts) for ranks, aborts in (asked[rank] for rank in went_on)}) == 1
        assert {*went_on, *asked[went_on[0]][0]} == {0, 1, 2, 3}
    else:
        assert len(set(found.values())) <= 1


def test_ranks_that_disagree_get_one_error_that_has_both_calls() -> None:
    ends = ends_of(3, HashStore())
    for attempt in range(2):
        found = call_all(ends, {0: [2], 1: [0]})
        assert len(set(found.values())) == 1, attempt
        assert found[0].startswith("MismatchError rank 1")
        assert "excludes rank(s) 12 with SHRINK_DEFAULT" in found[0]
        assert "excludes rank(s) 10 with SHRINK_DEFAULT" in found[0]
    assert set(call_all(ends, {0: [2], 1: [2]}).values()) == {""}


def test_a_rank_that_was_not_asked_before_joins_the_present_attempt() -> None:
    ends = ends_of(3, HashStore())
    call_all(ends, {0: [2], 1: [2, 0]})
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call, ends[0], [1])
        while not ends[0]._store.check(["1/proposal"]):
            pass
        assert call(ends[2], [1]) == ""
        assert first.result() == ""


def test_the_number_of_an_attempt_is_the_same_on_a_rank_that_missed_one() -> None:
    ends = ends_of(4, HashStore())
    assert all(call_all(ends, dict.fromkeys([0, 1], (3,)), timeout_s=0.1).values())

    def agree(rank: int) -> int:
        while rank == 2 and not ends[0]._store.check(["1/proposal"]):
            pass
        return ends[rank].agree([3], aborts=False, timeout_s=PATIENCE_S)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(agree, range(3))) == [1, 1, 1]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_late_rank_is_named_and_learns_it(late: int) -> None:
    ends = ends_of(4, HashStore())
    present = [rank for rank in range(3) if rank != late]
    found = call_all(ends, dict.fromkeys(present, (3,)), timeout_s=0.2)
    assert set(found.values()) == {call(ends[late], [3])}
    assert f"OperationTimeoutError rank(s) {10 + late} did not call it within 0.2 s" in found[present[0]]
    assert set(call_all(ends, dict.fromkeys(range(3), (3,))).values()) == {""}


def test_a_dead_rank_must_be_excluded() -> None:
    ends = ends_of(4, HashStore(), dead=[1, 3])
    found = call_all(ends, dict.fromkeys([0, 2], (3,)))
    assert len(set(found.values())) == 1
    assert "PeerLostError rank(s) 11 should stay, and died" in found[0]
    assert set(call_all(ends, dict.fromkeys([0, 2], (1, 3))).values()) == {""}


def test_errors_have_the_culprit() -> None:
    end = ends_of(3, HashStore(), dead=[1])[0]
    with pytest.raises(PeerLostError) as caught:
        end.agree([2], aborts=False, timeout_s=PATIENCE_S)
    error = caught.value
    assert (error.rank, error.culprit, error.operation, error.group) == (10, 11, "shrink_group", "7")


class Gone:
    """A Store whose process is gone."""

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            raise RuntimeError(name)

        return call


def test_without_a_store_there_is_an_error() -> None:
    end = ends_of(2, Gone())[0]
    assert "CommError the job's Store does not answer" in call(end, [1])
    assert end.farewell() == ""
