"""The merged trace: tracks, slices, arrows and counters, and the structure that Perfetto requires."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from commlayer.tools.trace.command import run
from commlayer.tools.trace.tracks import lanes

from .files import EPOCH_NS, MS, collective, flight, message, operation, profile, write

Trace = dict[str, Any]


def merged(folder: Path, **contents: Any) -> Trace:
    output = folder / "out" / "trace.json"
    output.parent.mkdir()
    run(write(folder, **contents), output, lambda _: None)
    trace: Trace = json.loads(output.read_text())
    check(trace)
    return trace


def check(trace: Trace) -> None:
    """What Perfetto asks of a trace: numbers of processes and threads with names, times in order, slices that nest on
    each track, arrows that begin once, end once and stop inside a slice."""
    names: dict[str, dict[int, str]] = {"process_name": {}, "thread_name": {}}
    open_slices: dict[int, list[tuple[int, int]]] = defaultdict(list)
    phases: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    latest = 0.0
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            number = event["pid"] if event["name"].startswith("process") else event["tid"]
            if event["name"] in names:
                assert number not in names[event["name"]]
                names[event["name"]][number] = event["args"]["name"]
            continue
        assert event["ts"] >= latest >= 0
        latest = event["ts"]
        assert event["pid"] in names["process_name"]
        assert event["ph"] == "C" or event["tid"] in names["thread_name"]
        start = round(event["ts"] * 1000)
        stack = open_slices[event["tid"]]
        if event["ph"] == "X":
            while stack and stack[-1][1] <= start:
                stack.pop()
            end = start + round(event["dur"] * 1000)
            assert end >= start
            assert not stack or end <= stack[-1][1], event
            stack.append((start, end))
        elif event["ph"] in "stf":
            assert stack
            assert stack[-1][0] <= start <= stack[-1][1]
            phases[event["cat"], event["name"], event["id"]].append(event["ph"])
    for phase in phases.values():
        assert phase[0] == "s"
        assert phase[-1] == "f"
        assert set(phase[1:-1]) <= {"t"}
    assert all(event["s"] != "g" for event in trace["traceEvents"] if event["ph"] == "i")


def slices(trace: Trace, name: str = "") -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and name in event["name"]]


def names(trace: Trace, kind: str) -> dict[int, str]:
    key = "pid" if kind == "process" else "tid"
    return {event[key]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == f"{kind}_name"}


def test_a_slice_of_each_collective_on_each_rank(tmp_path: Path) -> None:
    """Rank 1's clock is 3 s ahead."""
    own = [collective(7, 0, 5), collective(8, 6, 8)]
    theirs = [collective(7, 3001, 3005), collective(8, 3005.5, 3008)]
    trace = merged(tmp_path, one=flight(1, theirs), zero=flight(0, own))
    assert list(names(trace, "process").values()) == ["rank 0 (host0)", "rank 1 (host1)"]
    assert set(names(trace, "thread").values()) == {"default_pg (group 0)"}
    drawn = slices(trace, "all_reduce")
    assert [bar["name"] for bar in drawn] == ["all_reduce 7", "all_reduce 7", "all_reduce 8", "all_reduce 8"]
    first, second = drawn[:2]
    assert (first["ts"], first["dur"]) == (0, 5000)
    assert second["ts"] == pytest.approx(1000, abs=3500)
    assert first["args"] == {
        "group": "0",
        "ranks": [0, 1],
        "bytes": 4000,
        "sizes": [[1000]],
        "output sizes": [[1000]],
        "dtype": "float32",
        "reduction": "SUM",
        "caller": "/job/train.py:63 in train",
    }
    inner = slices(trace, "transfer")[0]
    assert (inner["ts"], inner["dur"], inner["tid"]) == (100, 4900, first["tid"])
    arrows = [event for event in trace["traceEvents"] if event["ph"] in "stf"]
    assert [arrow["ph"] for arrow in arrows] == ["s", "f", "s", "f"]
    assert {arrow["tid"] for arrow in arrows} == {bar["tid"] for bar in drawn}
    clocks = trace["otherData"]["clocks"]
    assert clocks[1]["offset_s"] == pytest.approx(-3, abs=clocks[1]["uncertainty_s"])
    labels = [event["args"]["labels"] for event in trace["traceEvents"] if event["name"] == "process_labels"]
    assert labels[0] == "clock: reference"
    assert labels[1].startswith("clock -2999.750 ms ±2.2")


def test_operations_in_flight_end_with_the_record(tmp_path: Path) -> None:
    entries = [collective(1, 10, None), collective(2, 20, None, failed=True)]
    trace = merged(tmp_path, a=flight(0, entries))
    first, second = slices(trace)
    assert (first["name"], first["dur"]) == ("all_reduce 1 (in flight)", 90_000)
    assert (second["name"], second["dur"]) == ("all_reduce 2 (failed)", 80_000)
    assert first["tid"] != second["tid"]  # they overlap


def test_the_counter_has_the_bytes_in_flight(tmp_path: Path) -> None:
    entries = [collective(1, 0, 5), collective(2, 1, 3, bytes=100), collective(3, 5, 6, bytes=50)]
    trace = merged(tmp_path, a=flight(0, entries))
    counted = [(event["ts"], event["args"]["bytes"]) for event in trace["traceEvents"] if event["ph"] == "C"]
    assert counted == [(0, 4000), (1000, 4100), (3000, 4000), (5000, 50), (6000, 0)]


def test_steps_and_the_parts_of_the_training_whose_data_moves(tmp_path: Path) -> None:
    """Steps before the first operation are left out."""
    entries = [collective(1, 10, 12, label="bucket 0", priority=3), collective(2, 20, 22, label="", priority=7)]
    steps = [{"number": number, "ended_ns": EPOCH_NS + at * MS} for number, at in ((8, 1), (9, 10), (10, 17), (11, 29))]
    trace = merged(tmp_path, a=flight(0, entries, steps=steps))
    drawn = [(bar["name"], bar["ts"], bar["dur"]) for bar in slices(trace, "step ")]
    assert drawn == [("step 10", 0, 7000), ("step 11", 7000, 12000)]
    assert list(names(trace, "thread").values()).count("steps") == 1
    first, second = slices(trace, "all_reduce")
    assert (first["name"], first["args"]["class"]) == ("all_reduce 1: bucket 0", 3)
    assert (second["name"], second["args"]["class"]) == ("all_reduce 2", 7)


def test_paths_have_counters_and_tell_their_death(tmp_path: Path) -> None:
    def reading(at_ms: int, sent: int, lost: int, *, is_dead: int = 0) -> dict[str, Any]:
        counters = {"packets_sent": sent, "packets_lost": lost, "datagram_bytes": 1472, "is_dead": is_dead}
        times = {"round_trip_us": 100 + at_ms, "queue_us": at_ms}
        return {"name": "eth0 to rank 1", "time_ns": EPOCH_NS + at_ms * MS, **counters, **times}

    paths = [reading(0, 0, 0), reading(500, 100, 5), reading(1000, 100, 5, is_dead=1), reading(1500, 400, 5)]
    trace = merged(tmp_path, a=flight(0, [collective(1, 0, 5)], paths=paths))
    rates = [event for event in trace["traceEvents"] if event["name"] == "eth0 to rank 1: packets per second"]
    assert [(rate["ts"], *rate["args"].values()) for rate in rates] == [
        (0, 200, 10),
        (500_000, 0, 0),
        (1_000_000, 600, 0),
    ]
    trips = [event["args"] for event in trace["traceEvents"] if event["name"] == "eth0 to rank 1: us"]
    assert trips[0] == {"round_trip_us": 600, "queue_us": 500}
    told = [(event["ts"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "i"]
    assert told == [(1_000_000, "eth0 to rank 1 died"), (1_500_000, "eth0 to rank 1 delivers again")]


def test_messages_have_a_track_and_arrows(tmp_path: Path) -> None:
    sent = [collective(1, 0, 2), message("send", 1, 4, 5, peer=1, ordinal=1)]
    received = [collective(1, 0, 2), message("recv", 1, 3, 6, peer=0, ordinal=1)]
    trace = merged(tmp_path, a=flight(0, sent), b=flight(1, received))
    assert list(names(trace, "thread").values()).count("messages") == 2
    source, target = slices(trace, "send 1 to 1")[0], slices(trace, "receive 1 from 0")[0]
    arrow = [event for event in trace["traceEvents"] if event["name"] == "message"]
    assert [(event["ph"], event["tid"]) for event in arrow] == [("s", source["tid"]), ("f", target["tid"])]
    assert source["args"]["tag"] == 0


def test_events_of_the_profiler_are_moved_with_the_clock_of_their_file(tmp_path: Path) -> None:
    """The profile of rank 0 is 2 s ahead of its record, and has the collective 5 that the record lost."""
    events = [*operation(5, 1990, 1995), *operation(6, 1999.95, 2004)]
    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 55, "tid": 8, "ts": 2_001_000, "dur": 1.5})
    events.append({"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 8, "ts": 2_001_000, "dur": 3})
    events.append({"ph": "M", "name": "process_labels", "pid": 0, "ts": 0, "args": {"labels": "GPU 0"}})
    events.append({"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 2_005_000})
    events += [
        {"ph": phase, "cat": "ac2g", "name": "ac2g", "id": 9, "pid": pid, "tid": 8, "ts": 2_001_000, "bp": "e"}
        for phase, pid in (("s", 55), ("f", 0))
    ]
    trace = merged(tmp_path, a=flight(0, [collective(6, 0, 4), collective(7, 5, 6)]), b=profile(0, events))
    assert list(names(trace, "process").values()) == ["rank 0 (host0)", "rank 0 (host0) GPU 0"]
    threads = list(names(trace, "thread").values())
    assert threads == [
        "default_pg (group 0)",
        "thread 7 (python): operations +1",
        "thread 7 (python)",
        "thread 8",
        "thread 8",
        "profiler",
    ]
    assert [bar["name"] for bar in slices(trace, "all_reduce ")] == ["all_reduce 5", "all_reduce 6", "all_reduce 7"]
    added, six = slices(trace, "aten::add")[0], slices(trace, "all_reduce 6")[0]
    assert added["ts"] - six["ts"] == pytest.approx(1000, abs=51)
    assert added["dur"] == 1.5
    assert trace["baseTimeNanoseconds"] == pytest.approx(EPOCH_NS - 10 * MS, abs=0.2 * MS)


def test_arrows_of_several_profiles_keep_apart(tmp_path: Path) -> None:
    def events(rank: int) -> list[Any]:
        add = {"ph": "X", "cat": "cpu_op", "name": "add", "pid": 55, "tid": 7, "ts": 1000 + rank, "dur": 9}
        where = {"cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 55, "tid": 7, "ts": 1000 + rank, "bp": "e"}
        return [add, {"ph": "s", **where}, {"ph": "f", **where}]

    trace = merged(tmp_path, a=profile(0, events(0)), b=profile(1, events(1)))
    assert len({event["id"] for event in trace["traceEvents"] if event["ph"] == "s"}) == 2


def test_profiles_alone_are_aligned(tmp_path: Path) -> None:
    """Rank 1's clock is 5 s behind."""
    trace = merged(
        tmp_path,
        a=profile(0, [*operation(1, 10_000, 10_004), *operation(2, 10_010, 10_012)]),
        b=profile(1, [*operation(1, 5_001, 5_004), *operation(2, 5_009, 5_013)]),
    )
    (clock,) = [entry for entry in trace["otherData"]["clocks"] if entry["rank"] == 1]
    assert clock["offset_s"] == pytest.approx(5, abs=clock["uncertainty_s"])
    assert clock["uncertainty_s"] < 0.004
    assert [event["ph"] for event in trace["traceEvents"] if event["ph"] in "sf"] == ["s", "f", "s", "f"]


def test_operations_of_a_profile_that_overlap_get_rows(tmp_path: Path) -> None:
    trace = merged(tmp_path, a=profile(0, [*operation(1, 0, 5), *operation(2, 1, 7), *operation(3, 6, 8)]))
    rows = {bar["name"]: bar["tid"] for bar in slices(trace, "all_reduce ")}
    assert rows["all_reduce 1"] == rows["all_reduce 3"] != rows["all_reduce 2"]
    assert [name for name in names(trace, "thread").values() if "operations" in name] == [
        "thread 7 (python): operations +1",
        "thread 7 (python): operations +2",
    ]


def test_slices_of_torch_that_overlap_get_a_row(tmp_path: Path) -> None:
    """Perfetto drops a slice that ends after the one around it. A child may come before its parent in the file."""
    spans = {"child": (1000, 3), "parent": (1000, 10), "late": (1005, 9), "in late": (1006, 7), "next": (1014, 2)}
    where = {"ph": "X", "cat": "cpu_op", "pid": 55, "tid": 7}
    events = [{**where, "name": name, "ts": start, "dur": length} for name, (start, length) in spans.items()]
    trace = merged(tmp_path, a=profile(0, events))
    tracks = names(trace, "thread")
    assert {bar["name"]: tracks[bar["tid"]] for bar in slices(trace)} == {
        "parent": "thread 7 (python)",
        "child": "thread 7 (python)",
        "late": "thread 7 (python): overlapping +1",
        "in late": "thread 7 (python): overlapping +1",
        "next": "thread 7 (python)",
    }


def test_lanes() -> None:
    spans = [(0, 5, "a"), (1, 3, "b"), (3, 9, "c"), (5, 6, "d"), (5, 5, "e")]
    assert [[name for _, _, name in row] for row in lanes(spans)] == [["a", "e"], ["b", "c"], ["d"]]


def test_a_trace_is_compressed_by_its_name(tmp_path: Path) -> None:
    output = tmp_path / "all.json.gz"
    run(write(tmp_path, a=flight(0, [collective(1, 0, 1)])), output, lambda _: None)
    assert output.read_bytes()[:2] == b"\x1f\x8b"
    said: list[str] = []
    run([tmp_path], tmp_path / "again.json", said.append)  # a folder with a trace of ours
    assert "events of 1 rank." in said[-1]


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none/trace.json: No such file .*; name a file that can be made with -o"):
        run(write(tmp_path, a=flight(0, [])), tmp_path / "none" / "trace.json", lambda _: None)
