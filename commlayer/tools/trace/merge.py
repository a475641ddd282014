"""One trace of all ranks, in Chrome's JSON format (Trace Event Format), which Perfetto reads."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .align import Alignment
from .kineto import has_time, nanoseconds
from .operation import Key, Operation, PathReading, Record
from .order import message_pairs
from .torch_events import moved
from .tracks import MESSAGES_PLACE, PATHS_PLACE, STEPS_PLACE, Event, Tracks, group_name, lanes

IN_FLIGHT = "bytes in flight"
SENT = ("packets_sent", "packets_lost")
DELAYS = ("round_trip_us", "queue_us")


@dataclasses.dataclass(eq=False)
class Slice:
    """An operation in the trace. Times are nanoseconds since the trace's start."""

    operation: Operation
    process: int
    thread: int
    start: int
    began: int | None
    end: int


def merged(records: Sequence[Record], alignments: Sequence[Alignment]) -> tuple[list[Event], int]:
    """The events of the trace, and the time in nanoseconds since 1970 at which their `ts` is 0."""
    tracks, events, slices = Tracks(), list[Event](), list[Slice]()
    flow_ids = itertools.count(1)
    offsets = {id(record): round(alignment.offset_ns) for record, alignment in zip(records, alignments, strict=True)}
    by_rank: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_rank[record.rank].append(record)
    base_ns = min((_first_ns(record) + offsets[id(record)] for record in records), default=0)
    for place, rank in enumerate(sorted(by_rank)):
        own = by_rank[rank]
        shifts = {id(record): offsets[id(record)] - base_ns for record in own}
        name = f"rank {rank}" + (f" ({host})" if (host := host_of(own)) else "")
        labels = clock_label(alignments[records.index(own[0])])
        process = tracks.process(name, 100 * place, labels)
        drawn = _slices(own, shifts, tracks, process)
        slices += drawn
        events += itertools.chain.from_iterable(_draw(record) for record in drawn)
        events += _counter(process, drawn)
        for record in own:
            where = shifts[id(record)], tracks, process
            events += itertools.chain(_steps(record, *where), _paths(record, *where))
            if record.kind == "profile":
                events += moved(record, shifts[id(record)], tracks, process, name, 100 * place, flow_ids)
    events += _arrows(slices, flow_ids)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))  # the longest first: the others nest in it
    return [*tracks.events, *events], base_ns


def host_of(records: Sequence[Record]) -> str:
    """The host of a rank, from any of its files; empty: not known."""
    return next((record.host for record in records if record.host), "")


def clock_label(alignment: Alignment) -> str:
    """How a clock was moved: `clock +3000.1 ms ±0.02 ms`."""
    text = f"clock {alignment.offset_ns / 1e6:+.3f} ms"
    if alignment.uncertainty_ns is None:
        return f"{text}, not aligned"
    return "clock: reference" if alignment.is_reference else f"{text} ±{alignment.uncertainty_ns / 1e6:.3f} ms"


def _first_ns(record: Record) -> int:
    """The time of the earliest event of a file."""
    times = [operation.submitted_ns for operation in record.operations]
    times += [step.ended_ns for step in record.steps] + [path.time_ns for path in record.paths]
    times += [nanoseconds(event["ts"], record.base_ns) for event in record.events if has_time(event)]
    return min(times, default=record.written_ns)


def _slices(records: Sequence[Record], shifts: Mapping[int, int], tracks: Tracks, process: int) -> list[Slice]:
    """The operations of one rank on their tracks. Those of the flight record are not drawn again from a
    profile."""
    seen: set[Key] = set()
    rows: dict[tuple[str, int], list[tuple[int, int, Slice]]] = defaultdict(list)
    for record in records:  # sorted by kind: the flight record comes first
        shift = shifts[id(record)]
        new = [operation for operation in record.operations if operation.key not in seen]
        seen |= {operation.key for operation in new}
        for operation in new:
            start = operation.submitted_ns + shift
            end = max(start, (operation.ended_ns or record.written_ns) + shift)
            began = None if operation.began_ns is None else min(operation.began_ns + shift, end)
            track = ("messages", MESSAGES_PLACE) if operation.is_message else (group_name(operation), 0)
            rows[track].append((start, end, Slice(operation, process, 0, start, began, end)))
    drawn = []
    for place, ((name, base), spans) in enumerate(rows.items()):
        for number, row in enumerate(lanes(spans)):
            thread = tracks.thread(process, name + (f" +{number}" if number else ""), base + 10 * place + number)
            drawn += [dataclasses.replace(bar, thread=thread) for _, _, bar in row]
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
    for bar in drawn:
        changes[bar.start] += bar.operation.nbytes
        changes[bar.end] -= bar.operation.nbytes
    total = 0
    for time, change in sorted(changes.items()):
        total += change
        yield {"ph": "C", "name": IN_FLIGHT, "pid": process, "tid": 0, "ts": time / 1000, "args": {"bytes": total}}


def _steps(record: Record, shift_ns: int, tracks: Tracks, process: int) -> Iterator[Event]:
    """A slice of each step, from the end of the optimizer's step before to that of its own."""
    if len(record.steps) < 2:
        return
    where = {"pid": process, "tid": tracks.thread(process, "steps", STEPS_PLACE)}
    for before, step in itertools.pairwise(record.steps):
        span = {"ts": (before.ended_ns + shift_ns) / 1000, "dur": (step.ended_ns - before.ended_ns) / 1000}
        yield {"ph": "X", "cat": "commlayer", "name": f"step {step.number}", **where, **span}


def _paths(record: Record, shift_ns: int, tracks: Tracks, process: int) -> Iterator[Event]:
    """Counters of each path: packets per second, sent and lost; round trip. An instant where it died or came back."""
    by_name: dict[str, list[PathReading]] = defaultdict(list)
    for reading in record.paths:
        by_name[reading.name].append(reading)
    thread = None
    for name, readings in by_name.items():
        for before, now in itertools.pairwise(readings):
            seconds = (now.time_ns - before.time_ns) / 1e9
            if seconds <= 0:
                continue
            # A counter holds until its next value: so the rate stands where its reading begins.
            sent = {key: round(max(0, now.counters[key] - before.counters[key]) / seconds) for key in SENT}
            yield _path_counter(process, f"{name}: packets per second", before, shift_ns, sent)
            yield _path_counter(process, f"{name}: us", now, shift_ns, {key: now.counters[key] for key in DELAYS})
            if now.counters["is_dead"] != before.counters["is_dead"]:
                if thread is None:
                    thread = tracks.thread(process, "paths", PATHS_PLACE)
                text = f"{name} {'died' if now.counters['is_dead'] else 'delivers again'}"
                at = {"pid": process, "tid": thread, "ts": (now.time_ns + shift_ns) / 1000}
                yield {"ph": "i", "cat": "commlayer", "name": text, "s": "t", **at}


def _path_counter(process: int, name: str, reading: PathReading, shift_ns: int, values: dict[str, int]) -> Event:
    at = {"pid": process, "tid": 0, "ts": (reading.time_ns + shift_ns) / 1000}
    return {"ph": "C", "name": name, **at, "args": values}


def _arrows(slices: Sequence[Slice], ids: Iterator[int]) -> Iterator[Event]:
    """A chain of arrows through each collective, from the rank that submitted it first to the last one; an arrow for
    each message. Every arrow needs a number of its own from `ids`."""
    collectives: dict[Key, list[Slice]] = defaultdict(list)
    for bar in slices:
        if not bar.operation.is_message:
            collectives[bar.operation.key].append(bar)
    for own in collectives.values():
        if len({bar.process for bar in own}) == len(own) > 1:  # else a later group has the same name
            own.sort(key=lambda bar: bar.start)
            yield from _arrow("collective", [(bar, bar.start) for bar in own], next(ids))
    messages = {id(bar.operation): bar for bar in slices if bar.operation.is_message}
    for sent, received in message_pairs([message.operation for message in messages.values()]):
        source, target = messages[id(sent)], messages[id(received)]
        time = max(source.start, target.start)
        if time <= target.end:  # else the clocks contradict each other
            yield from _arrow("message", [(source, source.start), (target, time)], next(ids))


def _arrow(name: str, stops: Sequence[tuple[Slice, int]], number: int) -> Iterator[Event]:
    last = len(stops) - 1
    for place, (bar, time) in enumerate(stops):
        phase = "s" if place == 0 else "f" if place == last else "t"
        where = {"pid": bar.process, "tid": bar.thread, "ts": time / 1000}
        yield {"ph": phase, "cat": "commlayer", "name": name, "id": number, "bp": "e", **where}
