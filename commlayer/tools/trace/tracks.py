"""The processes and threads of a trace: numbers, names and order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from .operation import Operation

T = TypeVar("T")

Event = dict[str, Any]

STEPS_PLACE, PATHS_PLACE = -2, -1
"""The steps are the first track of a rank, its paths the second. The groups' follow."""

MESSAGES_PLACE = 1000
"""The messages' tracks follow those of the groups, torch's threads follow them."""

THREADS_PLACE = 2000


class Tracks:
    """Hands out numbers. Their order is the order of the processes, and of the threads of a process."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.events: list[Event] = []
        """The metadata events of all tracks so far."""

    def process(self, name: str, place: int, labels: str = "") -> int:
        """A new process at a place in the order."""
        number = next(self._numbers)
        self._describe("process", number, 0, name, place)
        if labels:
            self.events.append(_metadata("process_labels", number, 0, {"labels": labels}))
        return number

    def thread(self, process: int, name: str, place: int) -> int:
        """A new track of a process."""
        number = next(self._numbers)
        self._describe("thread", process, number, name, place)
        return number

    def _describe(self, kind: str, pid: int, tid: int, name: str, place: int) -> None:
        self.events.append(_metadata(f"{kind}_name", pid, tid, {"name": name}))
        self.events.append(_metadata(f"{kind}_sort_index", pid, tid, {"sort_index": place}))


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def group_name(operation: Operation) -> str:
    """Name of the track of a group's collectives."""
    text = operation.description or f"ranks {', '.join(map(str, operation.ranks))}"
    return f"{text} (group {operation.group})"


def nested(spans: Sequence[tuple[int, int, T]]) -> Iterator[tuple[int, T]]:
    """The row of each span (start, end, item): 0 where it nests in those before it, else the first row that has
    room for it. Perfetto drops slices that overlap without nesting, which torch's traces have now and then."""
    rows: list[list[int]] = []
    for start, end, item in sorted(spans, key=lambda span: (span[0], -span[1])):
        for number, ends in enumerate([*rows, list[int]()]):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                if number == len(rows):
                    rows.append(ends)
                ends.append(end)
                yield number, item
                break


def lanes(spans: Sequence[tuple[int, int, T]]) -> list[list[tuple[int, int, T]]]:
    """Spans (start, end, item) as few rows in which none overlap: a track shows only slices that nest."""
    rows: list[list[tuple[int, int, T]]] = []
    for span in sorted(spans, key=lambda span: span[:2]):
        for row in rows:
            if row[-1][1] <= span[0] and row[-1][0] < span[0]:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows
