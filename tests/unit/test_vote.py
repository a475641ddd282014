"""The threads of a site act together, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest
from torch.distributed import HashStore

from commlayer.errors import CommError
from commlayer.frontend.local.vote import NEVER, NO, YES, Vote

SIZE = 3


def voted(votes: list[Vote], store: Any, places: Collection[int], may: Callable[[], bool] = lambda: True) -> list[str]:
    """One attempt of these places."""
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda place: votes[place].on(store, "begin 3", 7, may), places))


def until_all_agree(votes: list[Vote], store: Any, may: Callable[[], bool] = lambda: True) -> set[str]:
    for _ in range(50):
        if (found := set(voted(votes, store, range(SIZE), may))) != {NO}:
            return found
    return {NO}


def votes_of_all() -> list[Vote]:
    return [Vote(4, place, SIZE) for place in range(SIZE)]


def test_all_act_once_all_find_their_loops_late() -> None:
    votes, store = votes_of_all(), HashStore()
    assert voted(votes, store, [0, 2]) == [NO, NO]
    assert voted(votes, store, [0, 2]) == [NO, NO]
    assert voted(votes, store, [1]) == [NO]  # the others do not keep their loops now
    assert until_all_agree(votes, store) == {YES}


@pytest.mark.parametrize("fast", range(SIZE))
def test_a_loop_that_comes_back_makes_it_fail(fast: int) -> None:
    votes, store = votes_of_all(), HashStore()
    others = [place for place in range(SIZE) if place != fast]
    voted(votes, store, others)
    voted(votes, store, [fast])  # all were late
    assert voted(votes, store, others) == [NO, NO]
    assert voted(votes, store, others) == [NO, NO]
    assert until_all_agree(votes, store) == {YES}


def test_none_acts_while_their_loops_have_made_other_steps() -> None:
    """A rank that is away between its backward pass and `step()` has neighbours that have made that step."""
    votes, store, asked = votes_of_all(), HashStore(), list[int]()

    def may() -> bool:
        asked.append(1)
        return True

    def attempt(steps: list[int]) -> set[str]:
        with ThreadPoolExecutor(SIZE) as pool:
            return set(pool.map(lambda place: votes[place].on(store, "begin 3", steps[place], may), range(SIZE)))

    for _ in range(5):
        assert attempt([7, 8, 8]) == {NO}
    assert not asked
    assert YES in [found for _ in range(50) for found in attempt([8, 8, 8])]


def test_none_acts_if_they_must_not() -> None:
    asked = []

    def may() -> bool:
        asked.append(1)
        return False

    assert until_all_agree(votes_of_all(), HashStore(), may) == {NEVER}
    assert asked == [1]


class Distant:
    """A Store whose answers take so long. `fails`: the request that fails."""

    def __init__(self, store: Any, answer_s: float, fails: str = "") -> None:
        self._store, self._answer_s, self._fails = store, answer_s, fails

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            sleep(self._answer_s)
            if self._fails and name == "check" and self._fails in given[0][0]:
                raise RuntimeError("no answer")
            return getattr(self._store, name)(*given)

        return call


def test_the_ranks_of_a_site_that_is_far_from_the_store_agree() -> None:
    assert until_all_agree(votes_of_all(), Distant(HashStore(), 0.12)) == {YES}


@pytest.mark.parametrize("where", ["late", "verdict"])
def test_a_store_that_fails_is_an_error_once_the_others_may_act(where: str) -> None:
    vote, store = Vote(4, 0, 1), Distant(HashStore(), 0.0, where)
    if where == "late":
        assert vote.on(store, "begin 3", 7, lambda: True) == NO
        return
    with pytest.raises(CommError, match="the others may have acted without place 0"):
        vote.on(store, "begin 3", 7, lambda: True)
