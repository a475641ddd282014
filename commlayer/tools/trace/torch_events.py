"""The events of a torch.profiler trace, moved into the trace of all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .kineto import has_time, is_operation, nanoseconds
from .operation import Record
from .tracks import THREADS_PLACE, Event, Tracks, lanes, nested

CPU = "cpu_op"
"""Category of the events whose process is torch's own."""

NUMBERED = ("s", "t", "f", "b", "n", "e")
"""Phases of events that an id joins."""


def moved(
    record: Record, shift_ns: int, tracks: Tracks, process: int, name: str, place: int, ids: Iterator[int]
) -> Iterator[Event]:
    """The events on the common clock, those of the CPU in the rank's process, those of devices in processes beside it.

    `shift_ns`: from this file's clock to the trace's time. Numbers of processes, threads and arrows are new ones: the
    files of several ranks have the same ones.
    """
    events = [kept for kept in record.events if has_time(kept)]
    names = _names(record)
    processes = dict.fromkeys(_cpu_processes(events), process)
    threads: dict[tuple[Any, Any], int] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    rows = _rows(events)
    for number, entry in enumerate(events):
        pid, tid = entry.get("pid"), (entry.get("tid"), rows.get(number, ""))
        if not isinstance(pid, int):  # "Spans", "Traces": events about the profile itself
            processes[pid] = process
        elif pid not in processes:
            title = names.get((pid, None)) or str(pid)
            processes[pid] = tracks.process(f"{name} {title}", place + len(processes))
        if (pid, tid) not in threads:
            title = names.get((pid, tid[0])) or (f"thread {tid[0]}" if isinstance(pid, int) else "profiler")
            threads[pid, tid] = tracks.thread(processes[pid], title + tid[1], THREADS_PLACE + len(threads))
        event = {**entry, "pid": processes[pid], "tid": threads[pid, tid]}
        event["ts"] = (nanoseconds(entry["ts"], record.base_ns) + shift_ns) / 1000
        if entry.get("ph") in NUMBERED and "id" in entry:
            key = entry.get("cat"), entry.get("name"), str(entry["id"])
            if key not in numbers:
                numbers[key] = next(ids)
            event["id"] = numbers[key]
        if event.get("s") == "g":  # an instant of all processes: here of this rank
            event["s"] = "p"
        yield event


def _rows(events: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Ends of the names of tracks beside a thread's, by the event's place in `events`.

    commlayer's operations last longer than the functions that started them, so they have rows of their own; so have
    other slices that overlap without nesting.
    """
    operations: dict[Any, list[tuple[int, int, int]]] = defaultdict(list)
    others: dict[Any, list[tuple[int, int, int]]] = defaultdict(list)
    for number, event in enumerate(events):
        if event.get("ph") == "X":
            start = nanoseconds(event["ts"])
            spans = operations if is_operation(event) else others
            spans[event.get("pid"), event.get("tid")].append((start, start + nanoseconds(event.get("dur", 0)), number))
    found = {}
    for own in operations.values():
        for row, members in enumerate(lanes(own), 1):
            found.update({number: f": operations +{row}" for _, _, number in members})
    for own in others.values():
        found.update({number: f": overlapping +{row}" for row, number in nested(own) if row})
    return found


def _cpu_processes(events: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The processes that torch's operators ran in: one, in all traces that we know."""
    counts = Counter(event.get("pid") for event in events if event.get("cat") == CPU)
    return [pid for pid, _ in counts.most_common(1)]


def _names(record: Record) -> dict[tuple[Any, Any], str]:
    """Names that the file gives its threads (process, thread), and labels of its processes (process, None)."""
    found = {}
    for event in record.events:
        if event.get("ph") == "M":
            arguments = event.get("args", {})
            if event.get("name") == "thread_name":
                found[event.get("pid"), event.get("tid")] = str(arguments.get("name", ""))
            elif event.get("name") == "process_labels":
                found[event.get("pid"), None] = str(arguments.get("labels", ""))
    return found
