"""One trace of all ranks, in Chrome's JSON format (Trace Event Format), which Perfetto reads."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .align import Alignment
from .background import paths, steps
from .flows import Slice, arrows
from .kineto import has_time, nanoseconds
from .operation import Key, Operation, Record
from .torch_events import moved
from .tracks import MESSAGES_PLACE, Event, Tracks, group_name, lanes

IN_FLIGHT = "bytes in flight"


def merged(records: Sequence[Record], alignments: Sequence[Alignment]) -> tuple[list[Event], int]:
    """The events of the trace, and the time in nanoseconds since 1970 at which their `ts` is 0."""
    tracks, events, slices = Tracks(), list[Event](), list[Slice]()
    flow_ids = itertools.count(1)
    offsets = {id(record): round(each.offset_ns) for record, each in zip(records, alignments, strict=True)}
    by_rank: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_rank[record.rank].append(record)
    base_ns = min((_first_ns(record) + offsets[id(record)] for record in records), default=0)
    for place, rank in enumerate(sorted(by_rank)):
        own = by_rank[rank]
        shifts = {id(each): offsets[id(each)] - base_ns for each in own}
        name = f"rank {rank}" + (f" ({host})" if (host := host_of(own)) else "")
        labels = clock_label(alignments[records.index(own[0])])
        process = tracks.process(name, 100 * place, labels)
        drawn = _slices(own, shifts, tracks, process)
        slices += drawn
        events += itertools.chain.from_iterable(_draw(each) for each in drawn)
        events += _counter(process, drawn)
        for record in own:
            where = shifts[id(record)], tracks, process
            events += itertools.chain(steps(record, *where), paths(record, *where))
            if record.kind == "profile":
                events += moved(record, shifts[id(record)], tracks, process, name, 100 * place, flow_ids)
    events += arrows(slices, flow_ids)
    events.sort(key=lambda each: (each["ts"], -each.get("dur", 0)))  # the longest first: the others nest in it
    return [*tracks.events, *events], base_ns


def host_of(records: Sequence[Record]) -> str:
    """The host of a rank, from any of its files; empty: not known."""
    return next((each.host for each in records if each.host), "")


def clock_label(alignment: Alignment) -> str:
    """How a clock was moved: `clock +3000.1 ms ±0.02 ms`."""
    text = f"clock {alignment.offset_ns / 1e6:+.3f} ms"
    if alignment.uncertainty_ns is None:
        return f"{text}, not aligned"
    return "clock: reference" if alignment.is_reference else f"{text} ±{alignment.uncertainty_ns / 1e6:.3f} ms"


def _first_ns(record: Record) -> int:
    """The time of the earliest event of a file."""
    times = [each.submitted_ns for each in record.operations]
    times += [each.ended_ns for each in record.steps] + [each.time_ns for each in record.paths]
    times += [nanoseconds(each["ts"], record.base_ns) for each in record.events if has_time(each)]
    return min(times, default=record.written_ns)


def _slices(records: Sequence[Record], shifts: Mapping[int, int], tracks: Tracks, process: int) -> list[Slice]:
    """The operations of one rank on their tracks. Those of the flight record are not drawn again from a
    profile."""
    seen: set[Key] = set()
    rows: dict[tuple[str, int], list[tuple[int, int, Slice]]] = defaultdict(list)
    for record in records:  # sorted by kind: the flight record comes first
        shift = shifts[id(record)]
        new = [each for each in record.operations if each.key not in seen]
        seen |= {each.key for each in new}
        for each in new:
            start = each.submitted_ns + shift
            end = max(start, (each.ended_ns or record.written_ns) + shift)
            began = None if each.began_ns is None else min(each.began_ns + shift, end)
            track = ("messages", MESSAGES_PLACE) if each.is_message else (group_name(each), 0)
            rows[track].append((start, end, Slice(each, process, 0, start, began, end)))
    drawn = []
    for place, ((name, base), spans) in enumerate(rows.items()):
        for number, row in enumerate(lanes(spans)):
            thread = tracks.thread(process, name + (f" +{number}" if number else ""), base + 10 * place + number)
            drawn += [dataclasses.replace(each, thread=thread) for _, _, each in row]
    return drawn


def _draw(drawn: Slice) -> Iterator[Event]:
    """The slice from submission to end; in it, the part from the first byte on."""
    operation, where = drawn.operation, {"pid": drawn.process, "tid": drawn.thread}
    span = {"ts": drawn.start / 1000, "dur": (drawn.end - drawn.start) / 1000}
    yield {"ph": "X", "cat": "commlayer", "name": operation.title, **where, **span, "args": _arguments(operation)}
    if drawn.began is not None:
        span = {"ts": drawn.began / 1000, "dur": (drawn.end - drawn.began) / 1000}
        yield {"ph": "X", "cat": "commlayer", "name": "transfer", **where, **span}


def _arguments(operation: Operation) -> dict[str, Any]:
    shown = {"bytes": operation.nbytes, **operation.arguments, "root": operation.root, "tag": operation.tag}
    return {
        "group": operation.group,
        "ranks": list(operation.ranks),
        **{name: value for name, value in shown.items() if value is not None},
    }


def _counter(process: int, drawn: Sequence[Slice]) -> Iterator[Event]:
    """The bytes of the operations between submission and end."""
    changes: dict[int, int] = defaultdict(int)
    for each in drawn:
        changes[each.start] += each.operation.nbytes
        changes[each.end] -= each.operation.nbytes
    total = 0
    for time, change in sorted(changes.items()):
        total += change
        yield {"ph": "C", "name": IN_FLIGHT, "pid": process, "tid": 0, "ts": time / 1000, "args": {"bytes": total}}
