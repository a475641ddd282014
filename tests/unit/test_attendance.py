"""Monitored barriers: every rank learns the missing ranks, in time, and the next barrier works."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from commlayer.errors import OperationTimeoutError
from commlayer.transport import attendance
from commlayer.transport.attendance import Attendance
from commlayer.transport.members import Members


def barrier(ends: Sequence[Attendance], present: Sequence[int], timeout_s: float = 0.3) -> list[list[int]]:
    """The missing ranks, as each of the present ranks learns them."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: ends[rank].missing(timeout_s), present))


def ends_of(size: int, store: Any) -> list[Attendance]:
    return [Attendance(store, Members("7", rank, range(size))) for rank in range(size)]


def test_nobody_is_missing() -> None:
    store = HashStore()
    ends = ends_of(3, store)
    for _ in range(4):
        assert barrier(ends, range(3), 10.0) == [[]] * 3
    assert store.num_keys() <= 2  # barriers leave nothing behind but the last verdict


@pytest.mark.parametrize("absent", [[1], [0], [0, 2], [1, 3]])
def test_the_missing_ranks_are_named_on_all_others(absent: list[int]) -> None:
    ends = ends_of(4, HashStore())
    present = [rank for rank in range(4) if rank not in absent]
    start = time.monotonic()
    assert barrier(ends, present) == [absent] * len(present)
    assert time.monotonic() - start < 0.3 + attendance.SLACK_S


def test_a_late_rank_learns_that_it_was_missed_and_the_next_barrier_works() -> None:
    ends = ends_of(3, HashStore())
    assert barrier(ends, [0, 2]) == [[1], [1]]
    assert ends[1].missing(10.0) == [1]
    assert barrier(ends, range(3), 10.0) == [[]] * 3


def test_the_others_learn_from_rank_0_before_their_own_timeout() -> None:
    ends = ends_of(3, HashStore())
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda end: ends[end[0]].missing(end[1]), [(0, 0.2), (1, 30.0)]))
    assert found == [[2], [2]]
    assert time.monotonic() - start < 10.0


@pytest.mark.parametrize("gone", [True, False])
def test_a_store_that_is_gone_or_frozen_counts_as_rank_0(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "SLACK_S", 0.1)
    thaw = threading.Event()

    class Broken:
        def __getattr__(self, name: str) -> Any:
            def call(*_: Any) -> Any:
                if gone:
                    raise RuntimeError(name)
                thaw.wait(20)

            return call

    assert ends_of(2, Broken())[1].missing(0.1) == [0]
    thaw.set()


@pytest.mark.parametrize("all_ranks", [False, True])
def test_the_error_has_the_words_of_gloo(all_ranks: bool) -> None:
    ends = ends_of(4, HashStore())
    with ThreadPoolExecutor() as pool:
        failures = list(pool.map(lambda rank: _failure(ends[rank], all_ranks=all_ranks), (0, 3)))
    assert ("Ranks 1, 2 failed to pass" if all_ranks else "(Rank 1 failed to pass monitoredBarrier") in failures[0]
    assert "(Rank 3 successfully reached monitoredBarrier, but received errors while waiting" in failures[1]
    assert all("rank(s) 1, 2 did not call it within 0.3 s" in each for each in failures)


def _failure(end: Attendance, *, all_ranks: bool) -> str:
    with pytest.raises(OperationTimeoutError) as caught:
        end.barrier(0.3, all_ranks=all_ranks)
    return str(caught.value)
