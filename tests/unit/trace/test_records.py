"""Files of ranks are told apart by their content; others get an error with a remedy."""

import gzip
import json
import os
import pickle
import stat
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from commlayer.tools.trace.kineto import nanoseconds
from commlayer.tools.trace.records import MERGED, read, read_all
from commlayer.transport.call import Call, Calls
from commlayer.transport.flight import GroupRecord, Recorder

from .files import EPOCH_NS, MS, collective, flight, message, operation, profile, write


def read_quietly(*paths: Path) -> list[Any]:
    return list(read_all(paths, pytest.fail))


def test_a_record_of_the_flight_recorder(tmp_path: Path) -> None:
    """What the recorder of this package writes, whatever the name of the file is."""
    recorder, calls = Recorder(), Calls()
    calls.add(Call.of("all_reduce", [torch.ones(3)], [torch.ones(3)], reduction="SUM"))
    calls.collectives[0].ended_s = calls.collectives[0].submitted_s + 0.25
    for _ in range(2):
        calls.add(Call("send", torch.float32, [(2,)], rank=1, tag=4))
    calls.messages[0].ended_s = calls.messages[0].submitted_s + 0.5
    recorder.open(GroupRecord("9", lambda: "some", (4, 7), 0, calls, lambda: [1], lambda: ("", None)))
    for name in ("flight_4", "flight_4.json"):
        recorder.write(tmp_path / name, "a test")
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        record = read(tmp_path / name)
        assert (record.kind, record.rank, record.pid) == ("flight", 4, os.getpid())
        reduced, ended, sent = record.operations
        assert (reduced.title, reduced.group, reduced.description, reduced.ranks) == (
            "all_reduce 1",
            "9",
            "some",
            (4, 7),
        )
        assert (reduced.nbytes, reduced.inputs, reduced.outputs) == (12, 3, 3)
        assert reduced.ended_ns is not None
        assert reduced.ended_ns - reduced.submitted_ns == pytest.approx(0.25e9, abs=1000)
        assert (ended.title, ended.peer, ended.tag, ended.ordinal) == ("send 1 to 7", 7, 4, 1)
        assert (sent.title, sent.group, sent.ordinal, sent.key) == (
            "send 2 to 7 (in flight)",
            "9",
            2,
            ("9", (4, 7), 4, 2),
        )


def test_states_and_callers(tmp_path: Path) -> None:
    entries = [
        collective(1, 0, 5),
        collective(2, 6, None, failed=True),
        collective(3, 7, None, awaited_ranks=[1]),
        collective(4, 8, 9, profiling_name="gloo:reduce_scatter_v"),
        message("recv", 1, 8, None, peer=None, ordinal=1),
    ]
    (record,) = read_quietly(*write(tmp_path, a=flight(0, entries)))
    titles = [call.title for call in record.operations]
    assert titles[:3] == ["all_reduce 1", "all_reduce 2 (failed)", "all_reduce 3 (in flight)"]
    assert titles[3:] == ["reduce_scatter 4", "receive 1 from any rank (in flight)"]
    assert record.operations[0].arguments["caller"] == "/job/train.py:63 in train"
    assert record.operations[0].began_ns == EPOCH_NS + MS // 10
    assert record.operations[2].arguments["awaited ranks"] == [1]
    assert record.operations[3].outputs == 0  # parts of different sizes: that of this rank may be empty


def test_a_trace_of_the_profiler(tmp_path: Path) -> None:
    events = [
        *operation(1, 1, 3),
        *operation(2, 4, 9, finished=False),
        {"ph": "X", "name": "op", "ts": 12000, "dur": 1},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(profile(1, events)).encode()))
    record = read(path)
    assert (record.kind, record.rank, record.host) == ("profile", 1, "hostp")
    assert record.written_ns == EPOCH_NS + 12 * MS + 1000
    first, second = record.operations
    assert (first.title, first.nbytes, first.ranks) == ("all_reduce 1", 4000, (0, 1))
    assert (first.entered_ns, first.submitted_ns, first.ended_ns) == (
        EPOCH_NS + MS,
        EPOCH_NS + MS + MS // 10,
        EPOCH_NS + 3 * MS,
    )
    assert second.title == "all_reduce 2 (in flight)"


def test_a_call_without_an_event_around_it_does_not_end_with_that_of_another_one(tmp_path: Path) -> None:
    """The uneven all-gather 2 is called while the all-reduce 1, of the same thread, is in flight."""
    _, inner = operation(2, 2, 3)
    inner["args"]["Collective name"] = "_allgather_base"
    for name in ("all_reduce", "all_gather"):
        outer, first = operation(1, 1, 9)
        outer["name"] = f"commlayer:{name}"
        first["args"]["Collective name"] = {"all_reduce": "allreduce", "all_gather": "_allgather_base"}[name]
        (path,) = write(tmp_path, a=profile(0, [outer, first, inner]))
        assert [call.ended_ns for call in read(path).operations] == [EPOCH_NS + 9 * MS, None]


@pytest.mark.parametrize("text", ["4515699281853.805", "7775999999999.999", "0.001", "12"])
def test_times_of_months_in_microseconds_are_exact(text: str) -> None:
    """A slice that is a nanosecond longer than the one around it is dropped by Perfetto."""
    assert nanoseconds(float(text), EPOCH_NS) == EPOCH_NS + int(Decimal(text) * 1000)


def test_a_dtype_that_torch_does_not_name_has_one_byte(tmp_path: Path) -> None:
    events = operation(1, 1, 3)
    events[1]["args"]["dtype"] = "float8_e5m2"
    (path,) = write(tmp_path, a=profile(0, events))
    assert (read(path).operations[0].nbytes, read(path).operations[0].arguments["dtype"]) == (1000, "float8_e5m2")


def test_a_trace_without_the_job_s_rank_has_it_in_its_operations(tmp_path: Path) -> None:
    (path,) = write(tmp_path, a=profile(None, operation(1, 1, 3)))
    assert read(path).rank == 0


def test_a_folder_stands_for_its_files_and_a_later_record_replaces_an_earlier_one(tmp_path: Path) -> None:
    late = flight(1, [collective(1, 0, 5)], time_ns=EPOCH_NS + 200 * MS)
    write(tmp_path, a=late, b=flight(1, []), c=profile(0, []), d=flight(0, []), other={"x": 1})
    (tmp_path / "stacks_0.txt").write_text("Thread 1")
    (tmp_path / "empty").touch()
    (tmp_path / "half.json").write_text('{"entries": [')
    warned: list[str] = []
    found = read_all([tmp_path], warned.append)
    assert [(file.rank, file.kind, file.path.name) for file in found] == [
        (0, "flight", "d.json"),
        (0, "profile", "c.json"),
        (1, "flight", "a.json"),
    ]
    assert len(warned) == 1
    assert "half.json: the JSON ends or breaks off in line 1; copy or export it again" in warned[0]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("false",)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "an empty file; name flight records"),
        (b"Thread 1", "not JSON; name flight records"),
        (b"{'a'", "the JSON ends or breaks off in line 1"),
        (b"[1, 2]", "JSON without the fields of a record; name flight records"),
        (b'{"a": 1}', "JSON without the fields of a record; name flight records"),
        (b"\x1f\x8b\x08", "the compressed file is cut off"),
        (b'{"a":' * 100_000, "JSON in more levels than a record has"),
        (b'{"entries": [], "pg_config": {}, "rank": 0, "time_ns": 1e999}', "its entries are not those of version 2.10"),
        (pickle.dumps(flight(0, [])), "a pickle, which a stranger may have made to run code: "),
        (gzip.compress(pickle.dumps(Evil()), mtime=0), "if you trust whoever wrote this file, add --pickles"),
        (json.dumps({"traceEvents": [], "otherData": {"program": MERGED}}).encode(), "`commlayer trace` wrote"),
        (json.dumps(profile(None, [])).encode(), "it has no rank: let the profiler start after init_process_group"),
        (json.dumps(flight(0, [{}])).encode(), "its entries are not those of version 2.10"),
        (json.dumps({**flight(0, []), "rank": None}).encode(), "it has no rank: it was written before"),
    ],
)
def test_other_files_get_an_error_with_a_remedy(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r".*") as error:
        read_quietly(path)
    assert str(error.value).startswith(f"{path}: ")
    assert text in str(error.value)


@pytest.mark.parametrize("make", [bytes, gzip.compress], ids=["plain", "compressed"])
def test_a_pickle_is_read_where_the_user_asks(tmp_path: Path, make: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "flight_0"
    path.write_bytes(make(pickle.dumps(flight(0, [collective(1, 0, 5)]))))
    assert [call.title for call in read(path, pickles=True).operations] == ["all_reduce 1"]
    warned: list[str] = []
    with pytest.raises(ValueError, match="no file of a rank is there"):
        read_all([tmp_path], warned.append)
    assert len(warned) == 1
    assert "add --pickles" in warned[0]  # in a folder, too, the remedy is told


@pytest.mark.parametrize("content", [b"\x80\x04", pickle.dumps(Evil())], ids=["cut off", "with objects"])
def test_a_pickle_with_objects_is_never_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "flight_0"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"flight_0: (a pickle with objects|the pickle cannot be read)"):
        read(path, pickles=True)


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file of a rank is there; name flight records"):
        read_quietly(tmp_path)


def test_files_of_two_runs_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, a=flight(0, []), b=flight(0, [], pid=7))
    with pytest.raises(ValueError, match=r"both are of rank 0, of two processes .*; name the files of one run"):
        read_quietly(tmp_path)
