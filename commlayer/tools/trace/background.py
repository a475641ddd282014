"""What the flight record of a rank has besides operations: the steps of the training, and the paths of the network."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

from .operation import PathReading, Record
from .tracks import PATHS_PLACE, STEPS_PLACE, Event, Tracks

SENT = ("packets_sent", "packets_lost")
DELAYS = ("round_trip_us", "queue_us")


def steps(record: Record, shift_ns: int, tracks: Tracks, process: int) -> Iterator[Event]:
    """A slice of each step, from the end of the optimizer's step before to that of its own."""
    if len(record.steps) < 2:
        return
    where = {"pid": process, "tid": tracks.thread(process, "steps", STEPS_PLACE)}
    for before, each in itertools.pairwise(record.steps):
        span = {"ts": (before.ended_ns + shift_ns) / 1000, "dur": (each.ended_ns - before.ended_ns) / 1000}
        yield {"ph": "X", "cat": "commlayer", "name": f"step {each.number}", **where, **span}


def paths(record: Record, shift_ns: int, tracks: Tracks, process: int) -> Iterator[Event]:
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
            yield _counter(process, f"{name}: packets per second", before, shift_ns, sent)
            yield _counter(process, f"{name}: us", now, shift_ns, {key: now.counters[key] for key in DELAYS})
            if now.counters["is_dead"] != before.counters["is_dead"]:
                if thread is None:
                    thread = tracks.thread(process, "paths", PATHS_PLACE)
                text = f"{name} {'died' if now.counters['is_dead'] else 'delivers again'}"
                at = {"pid": process, "tid": thread, "ts": (now.time_ns + shift_ns) / 1000}
                yield {"ph": "i", "cat": "commlayer", "name": text, "s": "t", **at}


def _counter(process: int, name: str, reading: PathReading, shift_ns: int, values: dict[str, int]) -> Event:
    at = {"pid": process, "tid": 0, "ts": (reading.time_ns + shift_ns) / 1000}
    return {"ph": "C", "name": name, **at, "args": values}
