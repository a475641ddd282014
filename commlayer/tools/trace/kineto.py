"""Reads a trace of torch.profiler: its events, and the operations that its events `record_param_comms` describe."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...frontend.group.profile import DTYPES, EVENT, NAMES
from .operation import Operation, Record

PARAMETERS = (EVENT, EVENT.partition(":")[2])
"""Names of the event with the arguments: as written, and as users rename it for other tools."""

PREFIX = "commlayer:"

OURS = {theirs: ours for ours, theirs in NAMES.items()}


class Span(NamedTuple):
    """The event around an operation, in microseconds."""

    start: float
    end: float
    name: str
    ended: bool
    """Else torch has the end of the profile as its end."""


_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def read(path: Path, trace: Mapping[str, Any]) -> Record:
    """The record in a trace. Raises ValueError if it has no rank."""
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
    calls = [
        event for event in events if event.get("name") in PARAMETERS and event.get("args", {}).get("Seq") is not None
    ]
    info = trace.get("distributedInfo") or {}
    rank = info.get("rank")
    if rank is None and calls:
        arguments = calls[0]["args"]
        rank = as_list(arguments["Process Group Ranks"])[arguments["Rank"]]
    if rank is None:
        raise ValueError("it has no rank: let the profiler start after init_process_group")
    operations = _operations(rank, events, calls, base_ns)
    ends = [nanoseconds(event["ts"], base_ns) + nanoseconds(event.get("dur", 0)) for event in events if has_time(event)]
    return Record(
        path=path,
        kind="profile",
        rank=int(rank),
        host=str(trace.get("host_name") or ""),
        pid=None,
        written_ns=max(ends, default=base_ns),
        operations=operations,
        events=events,
        base_ns=base_ns,
    )


def nanoseconds(ts_us: float, base_ns: int = 0) -> int:
    """Nanoseconds since 1970 of an event's time, exact: a double has months in steps of a nanosecond, and not
    finer."""
    whole = int(ts_us)
    return base_ns + whole * 1000 + round((ts_us - whole) * 1000)


def as_list(value: Any) -> list[int]:
    """Lists are text in some versions of torch."""
    return list(json.loads(value)) if isinstance(value, str) else list(value)


def is_operation(event: Mapping[str, Any]) -> bool:
    """Whether it is the event of an operation, from the call to the end: `commlayer:all_reduce`."""
    name = event.get("name")
    return event.get("ph") == "X" and isinstance(name, str) and name.startswith(PREFIX) and name not in PARAMETERS


def has_time(event: Mapping[str, Any]) -> bool:
    """Whether an event has a time that counts: metadata has none."""
    return event.get("ph") != "M" and isinstance(event.get("ts"), int | float)


def _operations(rank: int, events: Sequence[Any], calls: Sequence[Any], base_ns: int) -> list[Operation]:
    """One for each event with arguments. Its end is that of the event around it, `commlayer:all_reduce`."""
    around: dict[Any, list[Span]] = {call["tid"]: [] for call in calls}
    for event in events:
        if is_operation(event) and event["tid"] in around:
            ended = event.get("args", {}).get("finished") is not False
            name = event["name"].removeprefix(PREFIX)
            around[event["tid"]].append(Span(event["ts"], event["ts"] + event["dur"], name, ended))
    found = []
    for tid, spans in around.items():
        spans.sort()
        own = sorted((call for call in calls if call["tid"] == tid), key=lambda call: float(call["ts"]))
        for call in own:
            place = bisect_right(spans, call["ts"], key=lambda span: span.start) - 1
            # Each span has one call: a call without a span of its own may be within that of an earlier one.
            outer = spans.pop(place) if place >= 0 and _is_around(spans[place], call) else None
            found.append(_operation(rank, call, outer, base_ns))
    return found


def _is_around(span: Span, call: Mapping[str, Any]) -> bool:
    name = call["args"]["Collective name"]
    return span.end >= call["ts"] and span.name.startswith(OURS.get(name, name))


def _operation(rank: int, call: Mapping[str, Any], outer: Span | None, base_ns: int) -> Operation:
    arguments = call["args"]
    name = str(arguments["Collective name"])
    name = OURS.get(name, name)
    dtype = _TORCH_DTYPES.get(arguments["dtype"])
    text = arguments["dtype"] if dtype is None else str(dtype).removeprefix("torch.")
    inputs, outputs = int(arguments["In msg nelems"]), int(arguments["Out msg nelems"])
    submitted_ns = nanoseconds(call["ts"], base_ns)
    splits = [as_list(arguments[side]) for side in ("In split size", "Out split size")]
    uneven = any(0 in sizes for sizes in splits) or (name == "reduce_scatter" and any(splits))
    peer = arguments.get("Dst Rank", arguments.get("Src Rank"))
    return Operation(
        rank=rank,
        name=name,
        group=str(arguments["Process Group Name"]),
        description=str(arguments.get("Process Group Description", "")).removeprefix("undefined"),
        ranks=tuple(as_list(arguments["Process Group Ranks"])),
        sequence=int(arguments["Seq"]),
        entered_ns=submitted_ns if outer is None else nanoseconds(outer.start, base_ns),
        submitted_ns=submitted_ns,
        ended_ns=nanoseconds(max(outer.end, call["ts"] + call["dur"]), base_ns) if outer and outer.ended else None,
        peer=peer,
        nbytes=(inputs or outputs) * (1 if dtype is None else dtype.itemsize),
        inputs=inputs,
        outputs=0 if uneven else outputs,
        arguments={} if name == "barrier" else {"elements": inputs or outputs, "dtype": text},
    )
