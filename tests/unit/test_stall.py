"""Warnings of collectives that wait: who has not called them, told by ranks that share a Store."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.transport import places, stall
from commlayer.transport.call import Call, Calls
from commlayer.transport.stall import StallWatch, Waits, note_key

STALL_S = 8.0
JOB_RANKS = (10, 11, 12, 13)


class Rank:
    """One rank: its watch and its group. Hosts have two ranks each."""

    def __init__(self, store: Any, rank: int, awaited: Sequence[int] = ()) -> None:
        self.calls = Calls()
        self.waits = Waits(
            who=lambda: f"rank {JOB_RANKS[rank]} of group '0'",
            name="0",
            rank=rank,
            hosts=((0, 1), (2, 3)),
            descriptions=[
                {"peer": peer, "life": f"life {peer}", "hostname": f"host{at // 2}"}
                for at, peer in enumerate(JOB_RANKS)
            ],
            calls=self.calls,
            store=store,
            notes=store,
            awaited=lambda: list(awaited),
        )
        self.watch = StallWatch(STALL_S)
        self.watch.add(self.waits)

    def call(self, ago_s: float, *, ended: bool = False) -> Call:
        call = Call.of("all_reduce", [torch.ones(3)], [torch.ones(3)], reduction="SUM")
        self.calls.add(call)
        call.submitted_s = time.monotonic() - ago_s
        call.ended_s = time.monotonic() if ended else None
        return call


def job(late: Sequence[int], ago_s: float, awaited: Sequence[int] = ()) -> list[Rank]:
    """Four ranks after one collective of all, and one that `late` has not called."""
    store: Any = dist.HashStore()
    ranks = [Rank(store, rank, awaited) for rank in range(4)]
    for number, rank in enumerate(ranks):
        rank.call(2 * STALL_S, ended=True)
        if number not in late:
            rank.call(ago_s)
    return ranks


def warnings_of(rank: Rank, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "commlayer"):
        rank.watch.look()
    return caplog.messages


def test_one_rank_of_each_host_names_the_late_one(caplog: pytest.LogCaptureFixture) -> None:
    ranks = job([3], STALL_S / 2)
    assert [warnings_of(rank, caplog) for rank in ranks] == [[]] * 4  # they say that they came
    for rank in ranks[:3]:
        rank.waits.oldest().submitted_s -= STALL_S  # type: ignore[union-attr]
    told = [warnings_of(rank, caplog) for rank in ranks[:3]]
    assert [len(lines) for lines in told] == [1, 0, 1]
    for number, (text,) in ((10, told[0]), (12, told[2])):
        assert text.startswith(f"rank {number} of group '0': all_reduce 2 of float32 [3], SUM")
        assert text.endswith(" has waited 12 s: rank 13 on host1 has not called it; see the warning there")
    assert [warnings_of(rank, caplog) for rank in ranks[:3]] == [[]] * 3  # once


def test_the_late_rank_says_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    ranks = job([1, 3], STALL_S)
    for rank in (ranks[0], ranks[2], ranks[0]):
        warnings_of(rank, caplog)
    (text,) = warnings_of(ranks[3], caplog)
    assert text.startswith("rank 13: rank 12 of group '0' has waited 8 s for this rank to call all_reduce 2 of float32")
    assert f"; its main thread is in where ({places.__file__}:" in text
    assert f"called by warnings_of ({__file__}:" in text
    assert warnings_of(ranks[3], caplog) == []


def test_a_rank_that_is_only_slow_reads_no_note(caplog: pytest.LogCaptureFixture) -> None:
    ranks = job([3], STALL_S)
    warnings_of(ranks[0], caplog)
    ranks[3].call(STALL_S / 4)
    assert warnings_of(ranks[3], caplog) == []


def test_a_note_that_comes_too_late_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    ranks = job([3], STALL_S)
    warnings_of(ranks[0], caplog)
    ranks[3].call(STALL_S, ended=True)
    assert warnings_of(ranks[3], caplog) == []
    assert not ranks[3].waits.notes.check([note_key("life 13")])


def test_a_note_is_for_its_group(caplog: pytest.LogCaptureFixture) -> None:
    ranks = job([3], STALL_S)
    warnings_of(ranks[0], caplog)
    ranks[3].waits.name = "another"
    assert warnings_of(ranks[3], caplog) == []
    ranks[3].waits.name = "0"
    assert len(warnings_of(ranks[3], caplog)) == 1


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b'{"group": "0", "sequence": "2", "text": "t"}'])
def test_a_malformed_note_is_skipped(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    ranks = job([3], STALL_S)
    ranks[3].waits.notes.set(note_key("life 13"), data)  # type: ignore[arg-type]
    (told,) = warnings_of(ranks[3], caplog)
    assert told.startswith("rank 13 on host1 skips a malformed note in the Store: ")
    warnings_of(ranks[0], caplog)
    (text,) = warnings_of(ranks[3], caplog)
    assert text.startswith("rank 13: rank 10 of group '0' has waited 8 s for this rank to call all_reduce 2")


def test_many_late_ranks_are_counted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "TOLD_MAX", 2)
    ranks = job([1, 2, 3], STALL_S)
    (text,) = warnings_of(ranks[0], caplog)
    assert text.endswith(": rank 11 on host0, rank 12 on host1 and 1 more have not called it; see the warning there")
    assert ranks[0].waits.notes.check([note_key("life 12")])
    assert not ranks[0].waits.notes.check([note_key("life 13")])


def test_if_all_have_called_it_the_engine_names_the_awaited_rank(caplog: pytest.LogCaptureFixture) -> None:
    ranks = job([], STALL_S / 2, awaited=[2])
    for rank in ranks:
        warnings_of(rank, caplog)
    ranks[0].waits.oldest().submitted_s -= STALL_S  # type: ignore[union-attr]
    (text,) = warnings_of(ranks[0], caplog)
    assert "all ranks have called it, this rank waits for data of rank 12; see the paths" in text


def test_the_end_of_a_wait_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ranks = job([3], STALL_S)
    warnings_of(ranks[0], caplog)
    call = ranks[0].waits.oldest()
    assert call is not None
    call.ended_s = call.submitted_s + 9
    assert warnings_of(ranks[0], caplog) == ["rank 10 of group '0': all_reduce 2 went on after 9 s"]
    assert warnings_of(ranks[0], caplog) == []


def test_the_oldest_of_many_is_found() -> None:
    rank = job([], 1.0)[0]
    first = rank.waits.oldest()
    assert first is not None
    assert first.sequence == 2
    for _ in range(stall.ENDED_MAX):
        rank.call(0.5, ended=True)  # of other classes, which may overtake
    assert rank.waits.oldest() is first
    rank.call(0.5, ended=True)
    assert rank.waits.oldest() is None


def test_a_store_that_is_gone_is_asked_ever_less() -> None:
    watch = StallWatch(30.0)
    assert [watch.pause_after(asks=False, failures=failures) for failures in (0, 1, 3, 6, 99)] == [5, 10, 40, 320, 320]
    assert watch.pause_after(asks=True, failures=0) == stall.ANSWER_LOOK_S


def test_the_thread_ends_with_the_last_group() -> None:
    groups = [Rank(dist.HashStore(), 0).waits for _ in range(2)]
    watch = StallWatch(STALL_S)
    for group in groups:
        watch.add(group)
    watch.start()
    assert not watch.remove(groups[0])
    assert watch.remove(groups[1])
    watch.close()
    assert not watch._thread.is_alive()


def test_a_group_that_is_gone_is_not_watched(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(dist.HashStore(), 0)
    rank.call(2 * STALL_S)
    watch = rank.watch
    del rank
    with caplog.at_level(logging.WARNING, "commlayer"):
        watch.look()
    assert caplog.messages == []
