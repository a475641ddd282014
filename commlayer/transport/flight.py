"""The flight recorder: the latest calls of all groups of this process, in the format of torch's analyzer.

    commlayer.flight_record("/shared/flight/flight_0.json")

`GroupRecord` is one group's part. `Recorder` has those of all groups; `recorder` is the one of this process.
docs/hang.md solves a hang with it. The fields are those of torch/csrc/distributed/c10d/FlightRecorder: the analyzer
matches the entries of all ranks by group and sequence number. The analyzer reads pickles, which run any code that they
name; records are JSON, and `commlayer trace --analyzer` makes pickles of them, in a folder of its user.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import linecache
import math
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from ..errors import ConfigError
from .call import COLLECTIVES_KEPT, Call, Calls, Shapes
from .fork import disowned_in_children
from .step_counts import StepCounts
from .whole_file import whole_file

FORMAT_VERSION = "2.10"
"""Version of the format that this module writes."""

ANALYZER_BACKEND = "gloo"
"""Begins the names of operations: torch's analyzer refuses names of backends that it does not know."""

READINGS = 9
"""Readings of the two clocks."""


def read_epoch_s() -> float:
    """The time of day at which `time.monotonic()` was 0: of several readings of both clocks, the one that took least,
    because another thread or process may run between the two."""
    found = []
    for _ in range(READINGS):
        before_s, now_s, after_s = time.monotonic(), time.time(), time.monotonic()
        found.append((after_s - before_s, now_s - (before_s + after_s) / 2))
    return min(found)[1]


EPOCH_S = read_epoch_s()
"""Time of day at which `time.monotonic()` was 0."""

STEPS_KEPT = 1000
"""The latest steps of optimizers that the recorder keeps."""

PATHS_KEPT = 5_000
"""Readings of paths: of ten paths, those of four minutes."""

CLOSED_KEPT = 8
"""Closed groups whose entries are kept."""

FRAMES_REMEMBERED = 4096
"""Frames of callers that are known by their lines: most calls come from few places."""

PACKAGE = str(Path(__file__).parents[1])

COLLECTIVES_BLOCK = 500
"""The first collective of a group has a number that follows a multiple of this, so that it is the same on all ranks."""


_numbers = itertools.count()


@dataclasses.dataclass(eq=False)
class GroupRecord:
    """What the recorder knows of one group on this rank."""

    name: str
    describe: Callable[[], str]
    ranks: Sequence[int]
    """Ranks of the job, by rank of the group."""
    rank: int
    calls: Calls
    awaited: Callable[[], list[int]]
    """Returns the ranks of the group that its collectives in flight wait for."""
    status: Callable[[], tuple[str, int | None]]
    """Returns the reason for which the group failed, or "", and the culprit."""
    number: int = dataclasses.field(default_factory=_numbers.__next__, init=False)
    """Another one for each group of this process, also where a later record has the memory of a former one."""

    def frozen(self) -> dict[str, Any]:
        """The group's parts of a dump: pg_config, pg_status and entries."""
        entries = [*self._collectives(), *self._messages()]
        configs = {(self.name, self.describe()): list(self.ranks)}
        configs |= {entry["process_group"]: entry.pop("_ranks") for entry in entries if "_ranks" in entry}
        reason, culprit = self.status()
        waits = [self.ranks[rank] for rank in self.awaited()] or ([] if culprit is None else [self.ranks[culprit]])
        for entry in entries:
            if entry["state"] != "completed" and not entry["is_p2p"]:
                entry["awaited_ranks"] = waits
        done = [
            entry["collective_seq_id"] for entry in entries if entry["state"] == "completed" and not entry["is_p2p"]
        ]
        status = {
            "last_enqueued_collective": self.calls.collective_count,
            "last_started_collective": self.calls.collective_count,
            "last_completed_collective": max(done, default=0),
            "failure": reason,
            "culprit": None if culprit is None else self.ranks[culprit],
            "awaited_ranks": waits,
        }
        return {
            "pg_config": {
                name: {"name": name, "desc": desc, "ranks": str(ranks)} for (name, desc), ranks in configs.items()
            },
            "pg_status": {self.name: status},
            "entries": entries,
        }

    def _collectives(self) -> Iterator[dict[str, Any]]:
        calls = list(self.calls.collectives)
        first = _first_kept(calls)
        for call in calls:
            if call.sequence >= first:
                yield {
                    **_entry(call, len(self.ranks)),
                    "process_group": (self.name, self.describe()),
                    "collective_seq_id": call.sequence,
                    "p2p_seq_id": 0,
                    "op_id": call.sequence,
                    "profiling_name": f"{ANALYZER_BACKEND}:{_name(call, len(self.ranks))}",
                    "is_p2p": False,
                    "root": None if call.rank is None else self.ranks[call.rank],
                }

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Messages in flight of two ranks, in one direction and with one tag, are a group of their own: so the analyzer
        finds the missing ones. Those that ended match nothing: a receive from any source does not tell its number."""
        own = self.ranks[self.rank]
        for call in list(self.calls.messages):
            other = None if call.rank is None else self.ranks[call.rank]
            in_flight = call.times() is None or call.has_failed()
            group, arrow, pair = f"messages of {own}", "{} 0{}0", [own]
            if in_flight and other is not None:
                source, target = (own, other) if call.name == "send" else (other, own)
                group = f"{source}->{target}" + (f" tag {call.tag}" if call.tag else "")
                pair = sorted((source, target))
                arrow = f"{{}} {pair.index(own)}{{}}{pair.index(other)}"
            yield {
                **_entry(call, len(self.ranks)),
                "process_group": (f"{self.name}/{group}", f"messages of {self.describe()}"),
                "collective_seq_id": call.ordinal if len(pair) == 2 else call.sequence,
                "p2p_seq_id": call.ordinal if len(pair) == 2 else call.sequence,
                "op_id": call.sequence,
                "profiling_name": f"{ANALYZER_BACKEND}:"
                + (arrow.format("send", "->") if call.name == "send" else arrow.format("recv", "<-")),
                "is_p2p": True,
                "peer": other,
                "tag": call.tag,
                "ordinal": call.ordinal,
                "awaited_ranks": [other] if in_flight and other is not None else [],
                "_ranks": pair,
            }


class Recorder:
    """The groups of a process. Any thread may call."""

    def __init__(self) -> None:
        self.disown()
        disowned_in_children(self)

    def disown(self) -> None:
        """Begins anew, without a group. See `fork.Owned`."""
        self._lock = threading.Lock()
        self._open: dict[int, GroupRecord] = {}
        self._closed: deque[dict[str, Any]] = deque(maxlen=CLOSED_KEPT)
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=STEPS_KEPT)
        self._step_counts = StepCounts()
        self._paths: deque[tuple[float, str, Mapping[str, Any]]] = deque(maxlen=PATHS_KEPT)
        self.rank: int | None = None
        """Rank of this process in its job; None before its first group."""

    def open(self, record: GroupRecord) -> None:
        """A group was made."""
        with self._lock:
            self.rank = record.ranks[record.rank]
            self._open[record.number] = record

    def close(self, record: GroupRecord) -> None:
        """The group is about to be closed: keeps its entries."""
        frozen = record.frozen()
        with self._lock:
            if self._open.pop(record.number, None) is not None and frozen["entries"]:
                self._closed.append(frozen)

    def groups(self) -> list[GroupRecord]:
        """The open groups."""
        with self._lock:
            return list(self._open.values())

    def failures(self) -> set[int]:
        """The open groups that have failed, as numbers."""
        with self._lock:
            records = list(self._open.values())
        return {record.number for record in records if record.status()[0]}

    def has_groups(self) -> bool:
        """Whether a group is open."""
        with self._lock:
            return bool(self._open)

    def collectives(self, since_s: float) -> list[Call]:
        """The collectives that were called on open groups since then, on the clock of `time.monotonic()`."""
        with self._lock:
            records = list(self._open.values())
        return [call for record in records for call in list(record.calls.collectives) if call.submitted_s >= since_s]

    def oldest(self) -> dict[str, float]:
        """The age in seconds of the oldest collective in flight, by group; 0: none is in flight."""
        with self._lock:
            records = list(self._open.values())
        ages = {}
        for record in records:
            waiting = [call.elapsed_s() for call in list(record.calls.collectives) if call.is_running()]
            ages[record.name] = max(waiting, default=0.0)
        return ages

    def note_step(self, optimizer: object) -> None:
        """The optimizer has made a step."""
        with self._lock:
            self._steps.append((*self._step_counts.add(optimizer), time.monotonic()))

    def note_path(self, name: str, counters: Mapping[str, Any]) -> None:
        """A reading of a path: some fields of `struct cl_path_stats`."""
        with self._lock:
            self._paths.append((time.monotonic(), name, counters))

    def _frozen_steps(self) -> list[dict[str, int | None]]:
        """The steps of the optimizer that has made most of those kept: others may step now and then."""
        with self._lock:
            steps = list(self._steps)
        made = Counter(whose for whose, _, _ in steps)
        leading = max(made, key=lambda each: made[each], default=None)
        return [{"number": count, "ended_ns": _nanoseconds(at_s)} for whose, count, at_s in steps if whose == leading]

    def _frozen_paths(self) -> list[dict[str, Any]]:
        with self._lock:
            paths = list(self._paths)
        return [{"name": name, "time_ns": _nanoseconds(at_s), **counters} for at_s, name, counters in paths]

    def dump(self, reason: str) -> dict[str, Any]:
        """Everything that is recorded."""
        with self._lock:
            records, parts = list(self._open.values()), list(self._closed)
        parts = [*parts, *(record.frozen() for record in records)]
        entries = [dict(entry) for part in parts for entry in part["entries"]]
        entries.sort(key=lambda entry: int(entry["time_created_ns"]))
        for number, entry in enumerate(entries):
            entry["record_id"] = number
        return {
            "version": FORMAT_VERSION,
            "backend": "commlayer",
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "reason": reason,
            "time_ns": time.time_ns(),
            "pg_config": {name: config for part in parts for name, config in part["pg_config"].items()},
            "pg_status": {name: status for part in parts for name, status in part["pg_status"].items()},
            "entries": entries,
            "steps": self._frozen_steps(),
            "paths": self._frozen_paths(),
        }

    def write(self, path: str | os.PathLike[str], reason: str) -> None:
        """Writes a dump as JSON, which no other user can read. A reader never finds half of it."""
        path = Path(path)
        text = json.dumps(self.dump(reason))
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(text.encode())


recorder = Recorder()
"""The recorder of this process."""


def flight_record(path: str | os.PathLike[str]) -> None:
    """Writes the flight record of this process: the last 1,000 operations of each group, with their arguments, times,
    callers and the ranks that they wait for.

    The file is JSON that no other user can read. `commlayer trace` draws the files of all ranks, and with `--analyzer`
    hands them to torch's analyzer. Raises ConfigError if the file cannot be written.
    """
    try:
        recorder.write(path, "flight_record was called")
    except OSError as error:
        raise ConfigError(
            f"flight_record({os.fspath(path)!r}): {error.strerror}; name a file that can be made"
        ) from error


def _first_kept(calls: Sequence[Call]) -> int:
    """The first number to write, the same on all ranks whose latest numbers are about the same."""
    if len(calls) < COLLECTIVES_KEPT:
        return 0
    return -(-(calls[0].sequence - 1) // COLLECTIVES_BLOCK) * COLLECTIVES_BLOCK + 1


def _entry(call: Call, size: int) -> dict[str, Any]:
    """The part of an entry that collectives and messages share."""
    times = call.times()
    ended = times is not None and not call.has_failed()
    begun_s = None if times is None else times.first_byte_s or times.submitted_s
    inputs, outputs = _sizes(call, size)
    dtype = [] if call.dtype is None else [str(call.dtype).removeprefix("torch.")]
    return {
        "frames": _frames(call),
        "record_id": 0,
        "pg_id": 0,
        "time_created_ns": _nanoseconds(call.submitted_s),
        "time_discovered_started_ns": _nanoseconds(begun_s),
        "time_discovered_completed_ns": _nanoseconds(times.ended_s) if times is not None and ended else None,
        "duration_ms": (times.ended_s - call.submitted_s) * 1e3 if times is not None and ended else None,
        "input_sizes": inputs,
        "output_sizes": outputs,
        "input_dtypes": dtype * min(len(inputs), 1),
        "output_dtypes": dtype * min(len(outputs), 1),
        "bytes": call.nbytes,
        "reduction": call.reduction,
        "priority": call.priority,
        "label": call.label,
        # An operation that failed never completed: so the analyzer compares it with the ranks that still wait.
        "state": "completed" if ended else "started",
        "failed": call.has_failed(),
        "retired": times is not None or call.is_failed,
        "timeout_ms": 0,
    }


def _nanoseconds(monotonic_s: float | None) -> int | None:
    """Nanoseconds since 1970 of a time of `time.monotonic()`."""
    return None if monotonic_s is None else int((monotonic_s + EPOCH_S) * 1e9)


def _sizes(call: Call, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes as the analyzer compares them: of lists of tensors in gathers and scatters one size; if the ranks' parts
    differ, that of the whole."""
    inputs, outputs = (
        [list(map(int, shape)) for shape in call.inputs],
        [list(map(int, output)) for output in call.outputs],
    )
    if _name(call, size).endswith("_v"):
        whole = [[max(_numel(inputs), _numel(outputs))]]
        return whole, whole
    if call.name in ("all_gather", "reduce_scatter") and (len(inputs) > 1 or len(outputs) > 1):
        return [[_numel(inputs)]], [[_numel(outputs)]]
    return inputs, outputs


def _name(call: Call, size: int) -> str:
    """The analyzer's name. Ranks with parts of different sizes: the analyzer must not compare them."""
    if call.name == "all_gather" and _numel(call.outputs) != _numel(call.inputs) * size:
        return "all_gather_v"
    if call.name == "reduce_scatter" and _numel(call.inputs) != _numel(call.outputs) * size:
        return "reduce_scatter_v"
    return call.name


def _numel(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _frames(call: Call) -> list[Mapping[str, Any]]:
    """The callers outside this package, innermost first."""
    pairs = zip(call.frames[::2], call.frames[1::2], strict=True)
    return [frame for code, instruction in pairs if (frame := _frame(code, instruction)) is not None]


@functools.lru_cache(FRAMES_REMEMBERED)
def _frame(code: CodeType, instruction: int) -> Mapping[str, Any] | None:
    """A caller; None: it is in this package."""
    if code.co_filename.startswith(PACKAGE):
        return None
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end and line is not None]
    line = lines[-1] if lines else code.co_firstlineno
    text = linecache.getline(code.co_filename, line).strip()
    return {"name": code.co_name, "filename": code.co_filename, "line": line, "text": text}


def callers(call: Call) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the callers outside this package, innermost first."""
    for frame in _frames(call):
        yield frame["filename"], frame["line"], frame["name"]
