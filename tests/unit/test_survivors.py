"""Members that live agree on those that are gone, whatever each of them knew at first."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from commlayer.errors import CommError, OperationTimeoutError
from commlayer.transport.survivors import Survivors

PATIENCE_S = 30.0
MEMBERS = range(5)


def nobody(_: Collection[int]) -> set[int]:
    return set()


def agree_all(known: Mapping[int, Collection[int]], dead: Collection[int] = (), late_s: float = 0.0) -> list[set[int]]:
    """What the members in `known` agree on; the last of them comes late."""
    store = HashStore()

    def agree(member: int) -> set[int]:
        if member == max(known):
            time.sleep(late_s)
        end = Survivors(store, member, MEMBERS, lambda watched: set(watched) & set(dead))
        verdict = end.agree(known[member], PATIENCE_S)
        assert verdict is not None
        return verdict.gone

    with ThreadPoolExecutor(len(known)) as pool:
        return list(pool.map(agree, known))


def test_what_one_member_knows_all_know() -> None:
    assert agree_all({0: [], 1: [3], 2: [4], 4: []}) == [{3, 4}] * 4
    assert agree_all({0: [], 2: [], 4: []}, dead=[1, 3], late_s=0.05) == [{1, 3}] * 3


def test_members_that_leave_wait_for_the_others() -> None:
    assert agree_all({0: [1], 1: [1], 2: [1], 3: [], 4: []}, late_s=0.05) == [{1}] * 5
    assert agree_all(dict.fromkeys(MEMBERS, MEMBERS)) == [set(MEMBERS)] * 5  # all leave
    assert agree_all({0: [0], 1: [0]}, dead=[2, 3, 4]) == [{0, 2, 3, 4}] * 2
    assert agree_all({0: [0]}, dead=[1, 2, 3, 4]) == [set(MEMBERS)]  # those that should stay died


@settings(deadline=None, max_examples=60)
@given(st.sets(st.sampled_from(MEMBERS), max_size=4), st.data())
def test_there_is_one_verdict_with_all_that_are_dead(dead: set[int], data: Any) -> None:
    living = [member for member in MEMBERS if member not in dead]
    known = {member: data.draw(st.sets(st.sampled_from(sorted(dead)))) if dead else set() for member in living}
    leavers = data.draw(st.sets(st.sampled_from(living)))
    for member in leavers:
        known[member] = known[member] | leavers
    assert agree_all(known, dead) == [dead | leavers] * len(living)


def test_a_member_that_others_take_for_dead_learns_it() -> None:
    store = HashStore()
    ends = [Survivors(store, member, MEMBERS, nobody) for member in (0, 1)]  # they hear nothing of the others
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda end: end.agree([2, 3, 4], PATIENCE_S), ends)) == [({2, 3, 4}, [])] * 2
    assert Survivors(store, 3, MEMBERS, nobody).agree([0, 1], PATIENCE_S) == ({2, 3, 4}, [])


def test_all_hear_of_the_newcomers_that_one_has_invited() -> None:
    store = HashStore()
    ends = [Survivors(store, member, range(3), nobody) for member in range(3)]
    ends[2].invite([8, 5])
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda end: end.agree([], PATIENCE_S), ends)) == [(set(), [5, 8])] * 3


def test_nobody_waits_for_a_member_that_withdrew() -> None:
    store = HashStore()
    Survivors(store, 2, range(3), nobody).withdraw()
    ends = [Survivors(store, member, range(3), nobody) for member in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda end: end.agree([], PATIENCE_S), ends)) == [({2}, [])] * 2


def test_nobody_waits_for_a_member_that_finished() -> None:
    store = HashStore()
    Survivors(store, 0, MEMBERS, nobody).finish()
    assert Survivors(store, 1, MEMBERS, lambda _: [0, 2]).agree([], PATIENCE_S) is None


def test_who_finishes_after_a_verdict_changes_nothing() -> None:
    store = HashStore()
    for _ in range(2):
        assert Survivors(store, 1, [0, 1], lambda _: [0]).agree([], PATIENCE_S) == ({0}, [])
        Survivors(store, 0, [0, 1], nobody).finish()


def test_a_member_that_does_not_come_is_named() -> None:
    with pytest.raises(OperationTimeoutError, match=r"rank 0: rank\(s\) 1, 2 did not agree within 0.1 s"):
        Survivors(HashStore(), 0, MEMBERS, nobody).agree([3, 4], 0.1)


def test_most_members_go_on_without_those_that_do_not_come() -> None:
    store = HashStore()
    ends = [Survivors(store, member, range(4), nobody) for member in range(4)]
    with ThreadPoolExecutor(2) as pool:  # 0 and 1 are two of three
        found = list(pool.map(lambda end, timeout_s: end.agree([3], timeout_s), ends[:2], (0.2, PATIENCE_S)))
    assert found == [({2, 3}, [])] * 2
    assert ends[2].agree([], PATIENCE_S) == ({2, 3}, [])  # when it wakes


def test_half_of_the_members_do_not_go_on_without_the_other_half() -> None:
    with pytest.raises(OperationTimeoutError, match=r"rank 1: rank\(s\) 0 did not agree within 0.1 s"):
        Survivors(HashStore(), 1, range(2), nobody).agree([], 0.1)


def test_without_a_store_there_is_an_error() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    with pytest.raises(CommError, match="the job's Store does not answer"):
        Survivors(Gone(), 0, MEMBERS, nobody).agree([], PATIENCE_S)
    Survivors(Gone(), 0, MEMBERS, nobody).finish()
    Survivors(Gone(), 0, MEMBERS, nobody).withdraw()


def test_members_go_with_those_that_they_cannot_go_on_without() -> None:
    rows = ((0, 1), (2, 3), (4,))

    def whole(gone: Collection[int]) -> set[int]:
        return {each for row in rows if not set(row).isdisjoint(gone) for each in row}

    for ended in ("died", "withdrew", "leaves"):
        store = HashStore()
        dead = {1} if ended == "died" else set()
        living = [0, 1, 2, 3, 4] if ended == "leaves" else [0, 2, 3, 4]
        ends = [Survivors(store, each, MEMBERS, lambda watched: set(watched) & dead, whole) for each in living]  # noqa: B023
        if ended == "withdrew":
            Survivors(store, 1, MEMBERS, nobody, whole).withdraw()
        known = [[each] if (ended, each) == ("leaves", 1) else [] for each in living]
        with ThreadPoolExecutor(len(ends)) as pool:
            found = list(pool.map(lambda end, gone: end.agree(gone, PATIENCE_S), ends, known))
        assert found == [({0, 1}, [])] * len(ends)
