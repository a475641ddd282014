"""Collectives in the traces of torch's profiler."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from commlayer.frontend.group.profile import EVENT, CommsProfile, stride
from commlayer.transport.call import Call
from tests import ranks


def traced(rank: int, size: int, folder: str, shapes: bool) -> list[dict[str, Any]]:
    """The events record_param_comms of a few operations, from the exported trace."""
    with ranks.job(rank, size):
        group = dist.new_group([3, 1], group_desc="pair", backend="commlayer")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as profiler:
            dist.all_reduce(torch.ones(100))
            dist.all_reduce(torch.ones(7, dtype=torch.int32), async_op=True).wait()
            dist.all_gather([torch.ones(5) for _ in range(size)], torch.ones(5))
            dist.all_to_all_single(torch.ones(8), torch.ones(8))
            if rank in (1, 3):
                dist.all_reduce(torch.ones(2, dtype=torch.bfloat16), group=group)
            if rank == 0:
                dist.send(torch.ones(6), 2)
            elif rank == 2:
                dist.recv(torch.ones(6), 0)
            dist.barrier()
        path = Path(folder, f"trace_{rank}.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("name") == EVENT]


def test_traces_have_the_metadata_of_collectives(tmp_path: Path) -> None:
    found = ranks.run(traced, 4, str(tmp_path), True)
    arguments = [[event["args"] for event in events] for events in found]
    reduced = arguments[3][0]
    assert {
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 100,
        "Out msg nelems": 100,
        "Group size": 4,
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Rank": 3,
        "Seq": 1,
        "Global rank start": 0,
        "Global rank stride": 1,
    }.items() <= reduced.items()
    assert as_list(reduced["Process Group Ranks"]) == [0, 1, 2, 3]
    assert as_list(reduced["In split size"]) == []
    names = [[argument["Collective name"] for argument in own] for own in arguments]
    common = ["allreduce", "allreduce", "_allgather_base", "all_to_allv"]
    assert names == [
        [*common, "send", "barrier"],
        [*common, "allreduce", "barrier"],
        [*common, "recv", "barrier"],
        [*common, "allreduce", "barrier"],
    ]
    assert (arguments[0][1]["dtype"], arguments[0][4]["Dst Rank"], arguments[2][4]["Src Rank"]) == ("Int", 2, 0)
    assert (arguments[0][2]["In msg nelems"], arguments[0][2]["Out msg nelems"]) == (5, 20)
    assert as_list(arguments[0][2]["Out split size"]) == [5, 5, 5, 5]
    pair = arguments[1][4]
    assert (pair["dtype"], pair["Group size"], pair["Process Group Description"]) == ("BFloat16", 2, "pair")
    assert (pair["Global rank start"], pair["Global rank stride"], pair["Seq"]) == (1, 2, 1)

    check_with_torch(tmp_path / "trace_0.json")


def test_without_shapes_events_have_no_metadata(tmp_path: Path) -> None:
    """torch keeps the arguments of an event only with record_shapes=True."""
    found = ranks.run(traced, 4, str(tmp_path), False)
    assert [len(rank) for rank in found] == [6, 6, 6, 6]
    assert "Seq" not in found[0][0]["args"]


def check_with_torch(path: Path) -> None:
    text = path.read_text()
    assert text.count(EVENT) == 6
    path.write_text(text.replace(EVENT, "record_param_comms"))
    if importlib.util.find_spec("torch.profiler._trace_validator") is None:
        return  # new in torch 2.13
    from torch.profiler._trace_validator import validate_trace

    passed, violations = validate_trace(str(path))
    assert passed, violations


def as_list(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def test_the_stride_of_ranks() -> None:
    assert [stride(members) for members in ([3], [0, 1, 2], [1, 5, 9], [0, 1, 5], [5, 3])] == [0, 1, 4, -1, -2]


def test_a_barrier_and_unusual_dtypes_have_metadata() -> None:
    comms = CommsProfile("1", lambda: "some", [2, 4], 1)
    barrier = comms.metadata(Call("barrier"))
    assert (barrier["Collective name"], barrier["dtype"], barrier["In msg nelems"]) == ("barrier", "Byte", 0)
    call = Call("receive", torch.float8_e5m2, (), [(3,)], rank=None, tag=0)
    assert comms.metadata(call)["dtype"] == "float8_e5m2"
    assert "Src Rank" not in comms.metadata(call)
