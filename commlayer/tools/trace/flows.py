"""Arrows between the slices of one collective on all ranks, and from a send to its receive."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from .operation import Key, Operation
from .order import message_pairs
from .tracks import Event


@dataclasses.dataclass(eq=False)
class Slice:
    """An operation in the trace. Times are nanoseconds since the trace's start."""

    operation: Operation
    process: int
    thread: int
    start: int
    began: int | None
    end: int


def arrows(slices: Sequence[Slice], ids: Iterator[int]) -> Iterator[Event]:
    """A chain of arrows through each collective, from the rank that submitted it first to the last one; an arrow for
    each message. Every arrow needs a number of its own from `ids`."""
    collectives: dict[Key, list[Slice]] = defaultdict(list)
    for each in slices:
        if not each.operation.is_message:
            collectives[each.operation.key].append(each)
    for own in collectives.values():
        if len({each.process for each in own}) == len(own) > 1:  # else a later group has the same name
            own.sort(key=lambda each: each.start)
            yield from _arrow("collective", [(each, each.start) for each in own], next(ids))
    messages = {id(each.operation): each for each in slices if each.operation.is_message}
    for sent, received in message_pairs([each.operation for each in messages.values()]):
        source, target = messages[id(sent)], messages[id(received)]
        time = max(source.start, target.start)
        if time <= target.end:  # else the clocks contradict each other
            yield from _arrow("message", [(source, source.start), (target, time)], next(ids))


def _arrow(name: str, stops: Sequence[tuple[Slice, int]], number: int) -> Iterator[Event]:
    last = len(stops) - 1
    for place, (each, time) in enumerate(stops):
        phase = "s" if place == 0 else "f" if place == last else "t"
        where = {"pid": each.process, "tid": each.thread, "ts": time / 1000}
        yield {"ph": phase, "cat": "commlayer", "name": name, "id": number, "bp": "e", **where}
