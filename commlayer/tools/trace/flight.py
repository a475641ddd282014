"""Reads a flight record: the format of `commlayer.transport.flight`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .operation import Operation, PathReading, Record, Step

TORCH = re.compile(r"/torch/(?!test)")
"""Matches the file names of torch's frames, which stand between the caller and this package."""


def read(path: Path, dump: Mapping[str, Any]) -> Record:
    """The record in a dump. Raises ValueError or KeyError if it is none."""
    rank = dump.get("rank")
    if not isinstance(rank, int):
        raise ValueError("it has no rank: it was written before the first process group, or not by commlayer")
    groups = {name: ranks_of(config["ranks"]) for name, config in dump["pg_config"].items()}
    written_ns = int(dump["time_ns"])
    operations = [_operation(entry, rank, groups) for entry in dump["entries"]]
    # Steps and paths may reach further back.
    since_ns = min((operation.submitted_ns for operation in operations), default=0)
    steps = [Step(int(entry["number"]), int(entry["ended_ns"])) for entry in dump.get("steps", [])]
    return Record(
        path=path,
        kind="flight",
        rank=rank,
        host=str(dump.get("host", "")),
        pid=dump.get("pid"),
        written_ns=written_ns,
        operations=operations,
        steps=[step for step in steps if step.ended_ns >= since_ns],
        paths=[_reading(reading) for reading in dump.get("paths", []) if reading["time_ns"] >= since_ns],
    )


def _reading(entry: Mapping[str, Any]) -> PathReading:
    counters = {name: int(value) for name, value in entry.items() if name not in ("name", "time_ns")}
    return PathReading(str(entry["name"]), int(entry["time_ns"]), counters)


def _operation(entry: Mapping[str, Any], rank: int, groups: Mapping[str, tuple[int, ...]]) -> Operation:
    group, description = entry["process_group"]
    is_message = bool(entry["is_p2p"])
    name = str(entry["profiling_name"]).partition(":")[2]
    if is_message:  # "send 0->1" of the group "0/4->7", or "messages of 4"
        name = "send" if name.startswith("send") else "receive"
        group, description = group.partition("/")[0], str(description).removeprefix("messages of ")
    submitted_ns = int(entry["time_created_ns"])
    began_ns, ended_ns = entry["time_discovered_started_ns"], entry["time_discovered_completed_ns"]
    caller = _caller(entry["frames"])
    shown = {
        "sizes": entry["input_sizes"],
        "output sizes": entry["output_sizes"],
        "dtype": next(iter([*entry["input_dtypes"], *entry["output_dtypes"]]), None),
        "reduction": entry["reduction"] or None,
        "class": entry.get("priority"),
        "awaited ranks": entry.get("awaited_ranks"),
        "caller": caller,
    }
    return Operation(
        rank=rank,
        name=name.removesuffix("_v"),
        group=str(group),
        description="" if description == "undefined" else str(description),
        ranks=groups.get(str(group), ()),
        sequence=int(entry["op_id"]),
        entered_ns=submitted_ns,
        submitted_ns=submitted_ns,
        began_ns=None if began_ns is None or began_ns <= submitted_ns else int(began_ns),
        ended_ns=None if ended_ns is None else int(ended_ns),
        failed=bool(entry["failed"]),
        root=entry.get("root"),
        peer=entry.get("peer"),
        tag=entry.get("tag"),
        ordinal=entry.get("ordinal"),
        nbytes=int(entry["bytes"]),
        inputs=_elements(entry["input_sizes"]),
        label=str(entry.get("label", "")),
        outputs=0 if name == "reduce_scatter_v" else _elements(entry["output_sizes"]),  # this rank's are not known
        arguments={name: value for name, value in shown.items() if value not in (None, [])},
    )


def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks of a group, which the format has as text: "[0, 2]"."""
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _elements(sizes: Iterable[Sequence[int]]) -> int:
    """The elements of all tensors together; 0 also if one is empty, whose rank may then be left out."""
    counts = [math.prod(size) for size in sizes]
    return sum(counts) if all(counts) else 0


def _caller(frames: Sequence[Mapping[str, Any]]) -> str | None:
    """File and line of the innermost caller outside torch."""
    for frame in frames:
        if not TORCH.search(frame["filename"]):
            return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return f"{frames[0]['filename']}:{frames[0]['line']}" if frames else None
