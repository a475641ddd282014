"""Files of ranks, made by hand: flight records and traces of torch.profiler."""

import json
from pathlib import Path
from typing import Any

from commlayer.frontend.group.profile import EVENT

MS = 1_000_000
EPOCH_NS = 1_790_857_026_000_000_000


def collective(number: int, start_ms: float, end_ms: float | None, **given: Any) -> dict[str, Any]:
    """An entry of a flight record: an all-reduce of the group 0, unless `given` says otherwise."""
    start_ns = EPOCH_NS + round(start_ms * MS)
    end_ns = None if end_ms is None else EPOCH_NS + round(end_ms * MS)
    torch_frame = {"name": "all_reduce", "filename": "/lib/torch/distributed/distributed_c10d.py", "line": 3245}
    entry = {
        "frames": [torch_frame, {"name": "train", "filename": "/job/train.py", "line": 63}],
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "op_id": number,
        "profiling_name": "gloo:all_reduce",
        "is_p2p": False,
        "root": None,
        "time_created_ns": start_ns,
        "time_discovered_started_ns": None if end_ns is None else start_ns + MS // 10,
        "time_discovered_completed_ns": end_ns,
        "input_sizes": [[1000]],
        "output_sizes": [[1000]],
        "input_dtypes": ["float32"],
        "output_dtypes": ["float32"],
        "bytes": 4000,
        "reduction": "SUM",
        "failed": False,
    }
    return {**entry, **given}


def message(kind: str, number: int, start_ms: float, end_ms: float | None, **given: Any) -> dict[str, Any]:
    """An entry of a send or recv; `given` has peer and ordinal."""
    arrow = "send 0->1" if kind == "send" else "recv 0<-1"
    named = {"profiling_name": f"gloo:{arrow}", "is_p2p": True, "tag": 0, "reduction": ""}
    group = {"process_group": ("0/messages of 0", "messages of default_pg")}
    return collective(number, start_ms, end_ms, **{**named, **group, **given})


def flight(rank: int, entries: list[dict[str, Any]], *, size: int = 2, host: str = "", **given: Any) -> dict[str, Any]:
    """A flight record, written 100 ms after the epoch."""
    ranks = str(list(range(size)))
    return {
        "version": "2.10",
        "rank": rank,
        "host": host or f"host{rank}",
        "pid": 1000 + rank,
        "time_ns": EPOCH_NS + 100 * MS,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "entries": entries,
        **given,
    }


def operation(number: int, start_ms: float, end_ms: float, *, tid: int = 7, finished: bool = True) -> list[Any]:
    """The two events of an all-reduce in a profile: it is submitted 0.1 ms after the call."""
    arguments = {
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Description": "default_pg",
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
        "Group size": 2,
        "Rank": 0,
        "Seq": number,
    }
    where = {"ph": "X", "pid": 55, "tid": tid}
    outer = {"ts": start_ms * 1000, "dur": (end_ms - start_ms) * 1000, "args": {} if finished else {"finished": False}}
    inner = {"ts": start_ms * 1000 + 100, "dur": 20.5, "args": arguments}
    return [
        {**where, "cat": "user_annotation", "name": "commlayer:all_reduce", **outer},
        {**where, "cat": "cpu_op", "name": EVENT, **inner},
    ]


def profile(rank: int | None, events: list[Any]) -> dict[str, Any]:
    """A trace of torch.profiler."""
    info = {} if rank is None else {"distributedInfo": {"backend": "commlayer", "rank": rank, "world_size": 2}}
    threads = [{"ph": "M", "name": "thread_name", "pid": 55, "tid": 7, "ts": 0, "args": {"name": "thread 7 (python)"}}]
    return {**info, "baseTimeNanoseconds": EPOCH_NS, "host_name": "hostp", "traceEvents": [*threads, *events]}


def write(folder: Path, **contents: Any) -> list[Path]:
    """Writes each as JSON: `write(folder, flight_0=...)` makes flight_0.json."""
    paths = []
    for name, content in contents.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(content))
    return paths
