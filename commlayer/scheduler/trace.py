"""Chrome trace of steps, simulated or measured: a process per rank, a track for its computations and one per link."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Something that took time, in seconds since the first step began."""

    rank: int
    track: str
    name: str
    start_s: float
    end_s: float


def trace_events(spans: Iterable[Span], *, source: str = "", first_process: int = 0) -> list[dict[str, Any]]:
    """Events of the Trace Event Format: complete events ("X") in microseconds, and names of processes and threads.

    `source` comes before the rank in a process's name. Processes are numbered by rank, from `first_process` on.
    """
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, str], int] = {}
    for span in spans:
        process = first_process + span.rank
        if (span.rank, span.track) not in tracks:
            thread = sum(rank == span.rank for rank, _ in tracks)
            tracks[span.rank, span.track] = thread
            for kind, name in (("process_name", f"{source} rank {span.rank}".strip()), ("thread_name", span.track)):
                events.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.name.partition(" ")[0],
                "pid": process,
                "tid": tracks[span.rank, span.track],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
        )
    return events


def write_trace(path: str | Path, spans: Iterable[Span] | Mapping[str, Iterable[Span]]) -> None:
    """Writes the spans as JSON that ui.perfetto.dev and chrome://tracing open.

    A mapping puts the spans of several sources beside each other, as {"measured": ..., "model": ...}.
    """
    sources = spans if isinstance(spans, Mapping) else {"": spans}
    events, first_process = list[dict[str, Any]](), 0
    for source, own in sources.items():
        own = list(own)
        events += trace_events(own, source=source, first_process=first_process)
        first_process += 1 + max((span.rank for span in own), default=-1)
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document), encoding="utf-8")
