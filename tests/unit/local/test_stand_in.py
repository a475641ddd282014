"""A site asks once for its place among those that are late."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch.distributed import HashStore

from commlayer.frontend.local.stand_in import StandIn
from commlayer.frontend.local.vote import NO, YES


class Failing:
    """A vote that fails so often after this rank was asked."""

    def __init__(self, times: int) -> None:
        self._times = times

    def on(self, _store: Any, _action: str, _steps: int, may: Callable[[], bool]) -> str:
        assert may()
        self._times -= 1
        return YES if self._times < 0 else NO


def test_votes_that_fail_use_up_no_place_of_another_site() -> None:
    rounds: Any = SimpleNamespace(sites=4, syncs=5, steps=20)
    store, first, second = HashStore(), Failing(3), Failing(1)
    sites = [StandIn(rounds, 2, vote) for vote in (first, second)]  # type: ignore[arg-type]  # it has what is asked for
    assert [sites[0]._granted(store, 5) for _ in range(4)] == [False, False, False, True]
    assert [sites[1]._granted(store, 5) for _ in range(2)] == [False, True]
    assert store.add("late 5", 0) == 2
