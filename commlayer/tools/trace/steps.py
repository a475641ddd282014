"""The steps of the training, as the flight record of a rank has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .operation import Record
from .tracks import STEPS_PLACE, Event, Tracks


def steps(record: Record, shift_ns: int, tracks: Tracks, process: int) -> Iterator[Event]:
    """A slice of each step, from the end of the optimizer's step before to that of its own."""
    if len(record.steps) < 2:
        return
    where = {"pid": process, "tid": tracks.thread(process, "steps", STEPS_PLACE)}
    for before, each in itertools.pairwise(record.steps):
        span = {"ts": (before.ended_ns + shift_ns) / 1000, "dur": (each.ended_ns - before.ended_ns) / 1000}
        yield {"ph": "X", "cat": "commlayer", "name": f"step {each.number}", **where, **span}
