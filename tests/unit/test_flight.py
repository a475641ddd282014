"""The flight recorder without a job: the entries that it keeps, and what it makes of a call."""

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commlayer.transport import flight
from commlayer.transport.call import Call, Calls
from commlayer.transport.flight import GroupRecord, Recorder
from commlayer.transport.watch import has_default_action


def record_of(calls: Calls, *, rank: int = 0, ranks: tuple[int, ...] = (4, 7), awaited: tuple[int, ...] = ()) -> Any:
    return GroupRecord("9", lambda: "some group", ranks, rank, calls, lambda: list(awaited), lambda: ("", None))


def entries(record: GroupRecord) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = record.frozen()["entries"]
    return found


def add(calls: Calls, *, count: int = 1, name: str = "all_reduce") -> None:
    for _ in range(count):
        call = Call.of(name, [torch.ones(3)], [torch.ones(3)])
        calls.add(call)
        call.ended_s = call.submitted_s


def test_the_time_of_day_is_that_of_the_quickest_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is preempted in all readings but the sixth."""
    now_s = 50.0

    def monotonic() -> float:
        return now_s

    def day() -> float:
        nonlocal now_s
        now_s += 0.002 if next(pauses) else 3.0
        return 1000.0 + now_s

    pauses = iter(number == 5 for number in range(20))
    monkeypatch.setattr(flight, "time", SimpleNamespace(monotonic=monotonic, time=day))
    assert abs(flight.read_epoch_s() - 1000.0) < 0.002


def test_the_last_thousand_are_written() -> None:
    calls = Calls()
    add(calls, count=1499)
    assert len(entries(record_of(calls))) == 1499
    add(calls, count=3000)
    numbers = [entry["collective_seq_id"] for entry in entries(record_of(calls))]
    assert numbers == list(range(3001, 4500))


@pytest.mark.parametrize("ahead", [1, 2, 17])
def test_ranks_write_the_same_range(ahead: int) -> None:
    """One rank has called a few more: else the analyzer would miss the first entries on it."""
    behind, before = Calls(), Calls()
    add(behind, count=5200)
    add(before, count=5200 + ahead)
    firsts = [entries(record_of(calls))[0]["collective_seq_id"] for calls in (behind, before)]
    assert firsts[0] == firsts[1] == 4001
    assert all(len(entries(record_of(calls))) >= 1000 for calls in (behind, before))


def test_messages_count_by_pair_and_direction() -> None:
    calls = Calls()
    for _ in range(700):
        calls.add(Call("send", torch.float32, [(2,)], rank=1, tag=0))
        calls.add(Call("receive", torch.float32, (), [(2,)], rank=1, tag=0))
    found = entries(record_of(calls))
    assert len(found) == 1000
    sent = [entry for entry in found if "send" in entry["profiling_name"]]
    assert [entry["collective_seq_id"] for entry in sent] == list(range(201, 701))
    assert sent[0]["process_group"] == ("9/4->7", "messages of some group")
    assert sent[0]["profiling_name"] == "gloo:send 0->1"
    received = next(entry for entry in found if "recv" in entry["profiling_name"])
    assert (received["process_group"][0], received["profiling_name"]) == ("9/7->4", "gloo:recv 0<-1")
    assert received["awaited_ranks"] == [7]


def test_a_receive_from_any_rank_has_a_group_of_its_own() -> None:
    calls = Calls()
    calls.add(Call("receive", torch.float32, (), [(2,)], rank=None, tag=5))
    frozen = record_of(calls).frozen()
    assert frozen["pg_config"]["9/messages of 4"]["ranks"] == "[4]"
    (entry,) = frozen["entries"]
    assert (entry["profiling_name"], entry["peer"], entry["tag"]) == ("gloo:recv 0<-0", None, 5)


def test_a_running_call_names_the_awaited_ranks() -> None:
    calls = Calls()
    add(calls)
    calls.add(Call.of("all_reduce", [torch.ones(3)], [torch.ones(3)]))
    done, running = entries(record_of(calls, awaited=(1,)))
    assert (done["state"], "awaited_ranks" in done) == ("completed", False)
    assert (running["state"], running["awaited_ranks"]) == ("started", [7])
    assert record_of(calls, awaited=(1,)).frozen()["pg_status"]["9"]["last_completed_collective"] == 1


def test_the_culprit_of_a_failed_group_is_awaited() -> None:
    calls = Calls()
    call = Call.of("all_reduce", [torch.ones(3)], [torch.ones(3)])
    calls.add(call)
    call.is_failed = True
    record = record_of(calls)
    record.status = lambda: ("the operation timed out", 1)
    (entry,) = entries(record)
    assert (entry["state"], entry["failed"], entry["awaited_ranks"]) == ("started", True, [7])
    assert record.frozen()["pg_status"]["9"]["culprit"] == 7


def test_frames_are_those_of_the_caller() -> None:
    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            add(calls)

    calls = Calls()
    deep(6)
    (entry,) = entries(record_of(calls))
    assert entry["frames"][0]["name"] == "deep"
    assert entry["frames"][0]["filename"] == __file__
    assert entry["frames"][0]["text"] == "deep(levels - 1)"


def closed() -> Iterator[Recorder]:
    recorder = Recorder()
    for number in range(12):
        calls = Calls()
        add(calls)
        record = record_of(calls)
        record.name = str(number)
        recorder.open(record)
        recorder.close(record)
        recorder.close(record)
    yield recorder


def test_closed_groups_are_kept_for_a_while() -> None:
    for recorder in closed():
        dump = recorder.dump("test")
        assert sorted(dump["pg_config"]) == ["10", "11", "4", "5", "6", "7", "8", "9"]
        assert [entry["record_id"] for entry in dump["entries"]] == list(range(8))
        assert recorder.rank == 4


def test_handled_signals_are_known() -> None:
    assert has_default_action(signal.SIGUSR2)
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        assert not has_default_action(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_record_in_the_memory_of_a_former_one_has_another_number() -> None:
    numbers = [record_of(Calls()).number for _ in range(100)]  # each record is freed before the next
    assert len(set(numbers)) == 100
