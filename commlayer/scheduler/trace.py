"""Chrome trace of simulated steps: a process per rank, a track for its computations and one per link."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Something that took time, in seconds since the first step began."""

    rank: int
    track: str
    name: str
    start_s: float
    end_s: float


def trace_events(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Events of the Trace Event Format: complete events ("X") in microseconds, and names of processes and threads."""
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, str], int] = {}
    for span in spans:
        if (span.rank, span.track) not in tracks:
            thread = sum(rank == span.rank for rank, _ in tracks)
            tracks[span.rank, span.track] = thread
            for kind, name in (("process_name", f"rank {span.rank}"), ("thread_name", span.track)):
                events.append({"ph": "M", "name": kind, "pid": span.rank, "tid": thread, "args": {"name": name}})
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.name.partition(" ")[0],
                "pid": span.rank,
                "tid": tracks[span.rank, span.track],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
        )
    return events


def write_trace(path: str | Path, spans: Iterable[Span]) -> None:
    """Writes the spans as JSON that ui.perfetto.dev and chrome://tracing open."""
    document = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document), encoding="utf-8")
