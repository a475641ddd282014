"""Chrome trace events: one process per rank, one thread per track, microseconds."""

import json
from pathlib import Path

from commlayer.scheduler.trace import Span, trace_events, write_trace

SPANS = [Span(1, "compute", "F stage 1 mb 0", 0.5, 1.5), Span(1, "link", "REDUCE stage 1", 1.0, 2.0)]


def test_events() -> None:
    events = trace_events([*SPANS, Span(1, "compute", "B stage 1 mb 0", 1.5, 3.5)])
    names = {(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {
        ("process_name", 1, 0, "rank 1"),
        ("thread_name", 1, 0, "compute"),
        ("process_name", 1, 1, "rank 1"),
        ("thread_name", 1, 1, "link"),
    }
    assert [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("F stage 1 mb 0", "F", 0, 5e5, 1e6),
        ("REDUCE stage 1", "REDUCE", 1, 1e6, 1e6),
        ("B stage 1 mb 0", "B", 0, 1.5e6, 2e6),
    ]


def test_the_file_is_json_with_trace_events(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", SPANS)
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["traceEvents"] == trace_events(SPANS)


def test_sources_stand_beside_each_other(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", {"measured": SPANS, "model": [SPANS[0]]})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "measured rank 1", 3: "model rank 1"}
    assert [event["pid"] for event in events if event["ph"] == "X"] == [1, 1, 3]
