"""Monitored barriers: every rank learns the missing ranks, in time, and the next barrier works."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from commlayer.errors import OperationTimeoutError
from commlayer.transport import attendance
from commlayer.transport.attendance import Attendance
from commlayer.transport.members import Members


@pytest.fixture(autouse=True)
def a_patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "SLACK_S", 30.0)


def come(ends: Sequence[Attendance], present: Sequence[int]) -> None:
    """The Store knows that these ranks have come, however late their threads run on a busy machine."""
    for rank in present:
        ends[rank]._store.set(f"{ends[rank]._barriers}/{rank}", "")


def barrier(ends: Sequence[Attendance], present: Sequence[int], timeout_s: float = 0.3) -> list[list[int] | None]:
    """The missing ranks, as each of the present ranks learns them."""
    if len(present) < len(ends):
        come(ends, present)
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
    assert time.monotonic() - start < attendance.SLACK_S


def test_a_late_rank_learns_that_it_was_missed_and_the_next_barrier_works() -> None:
    ends = ends_of(3, HashStore())
    assert barrier(ends, [0, 2]) == [[1], [1]]
    assert ends[1].missing(10.0) == [1]
    assert barrier(ends, range(3), 10.0) == [[]] * 3


def test_the_others_learn_from_rank_0_before_their_own_timeout() -> None:
    ends = ends_of(3, HashStore())
    come(ends, [0, 1])
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda end: ends[end[0]].missing(end[1]), [(0, 0.2), (1, 60.0)]))
    assert found == [[2], [2]]
    assert time.monotonic() - start < 50.0


class Meddling:
    """A store that calls `before` before each check of keys."""

    def __init__(self, store: HashStore, before: Callable[[list[str]], None]) -> None:
        self._store = store
        self._before = before

    def check(self, keys: list[str]) -> bool:
        self._before(keys)
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("when", ["before the last check of the ranks", "after it"])
def test_a_verdict_at_the_last_moment_counts(when: str) -> None:
    store = HashStore()
    for rank in (0, 2):
        store.set(f"0/{rank}", "")
    own_key_checked = threading.Event()

    def rank_0_passes(keys: list[str]) -> None:
        """Rank 0 publishes its verdict and deletes the keys, when rank 1 has stopped waiting for it."""
        last = ["0/0"] if when.startswith("before") else ["0/2"]
        if keys == last and not own_key_checked.is_set():
            own_key_checked.set()
            store.set("0/missing", "[]")
            for rank in range(3):
                store.delete_key(f"0/{rank}")

    assert ends_of(3, Meddling(store, rank_0_passes))[1].missing(0.05) == []
    assert own_key_checked.is_set()


def test_a_verdict_is_awaited_when_all_ranks_have_come() -> None:
    store = HashStore()
    for rank in (0, 2):
        store.set(f"0/{rank}", "")
    timer = threading.Timer(0.4, store.set, ("0/missing", "[]"))
    timer.start()
    assert ends_of(3, store)[1].missing(0.1) == []
    timer.join()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("gone", [True, False])
def test_without_a_store_no_rank_is_to_blame(gone: bool, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "SLACK_S", 0.05)
    thaw = threading.Event()

    class Broken:
        def __getattr__(self, name: str) -> Any:
            def call(*_: Any) -> Any:
                if gone:
                    raise RuntimeError(name)
                thaw.wait(20)

            return call

    with pytest.raises(OperationTimeoutError, match="the job's Store does not answer; look at the log") as caught:
        ends_of(2, Broken())[rank].barrier(0.1)
    thaw.set()
    assert (caught.value.culprit, caught.value.rank) == (None, rank)
    assert "did not call" not in str(caught.value)


@pytest.mark.parametrize("all_ranks", [False, True])
def test_the_error_has_the_words_of_gloo(all_ranks: bool) -> None:
    ends = ends_of(4, HashStore())
    come(ends, [0, 3])
    with ThreadPoolExecutor() as pool:
        failures = list(pool.map(lambda rank: _failure(ends[rank], all_ranks=all_ranks), (0, 3)))
    assert ("Ranks 1, 2 failed to pass" if all_ranks else "(Rank 1 failed to pass monitoredBarrier") in failures[0]
    assert "(Rank 3 successfully reached monitoredBarrier, but received errors while waiting" in failures[1]
    assert all("rank(s) 1, 2 did not call it within 0.3 s" in failure for failure in failures)


def _failure(end: Attendance, *, all_ranks: bool) -> str:
    with pytest.raises(OperationTimeoutError) as caught:
        end.barrier(0.3, all_ranks=all_ranks)
    return str(caught.value)
