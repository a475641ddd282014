"""`commlayer trace` on the files of a real job: two ranks, with a flight record and a profile each."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import commlayer
from commlayer.tools.trace.command import run
from tests import ranks
from tests.unit.trace.test_merge import check

SKEW_S = 3.0

EPOCH_ERROR_S = 0.0005
"""Two clocks are not read at the same moment (`flight.read_epoch_s`)."""


def recorded(rank: int, size: int, folder: str) -> None:
    with ranks.job(rank, size):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            for _ in range(10):
                dist.all_reduce(torch.ones(1000))
            works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
            for _ in range(3):
                dist.send(torch.ones(6), 1) if rank == 0 else dist.recv(torch.ones(6), 0)
                dist.recv(torch.ones(6), 1) if rank == 0 else dist.send(torch.ones(6), 0)
        profiler.export_chrome_trace(str(Path(folder, f"trace_{rank}.json.gz")))
        commlayer.flight_record(Path(folder, f"flight_{rank}.json"))


def skewed(path: Path) -> None:
    """Moves the clock of a flight record ahead."""
    dump = json.loads(path.read_text())
    dump["time_ns"] += round(SKEW_S * 1e9)
    for entry in dump["entries"]:
        for name in ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[name] += round(SKEW_S * 1e9)
    path.write_text(json.dumps(dump))


def files_of(found: dict[str, Any]) -> dict[str, Any]:
    assert found["warnings"] == []
    return {Path(file["path"]).name: file for rank in found["ranks"] for file in rank["files"]}


def test_the_files_of_a_job_become_one_trace(tmp_path: Path) -> None:
    """All processes share one clock: every file has offset 0, but the one that the test sets ahead."""
    ranks.run(recorded, 2, str(tmp_path))
    output = tmp_path / "all.json"
    before = files_of(run([tmp_path], output, lambda _: None))
    assert set(before) == {"flight_0.json", "flight_1.json", "trace_0.json.gz", "trace_1.json.gz"}
    skewed(tmp_path / "flight_1.json")
    for name, file in files_of(run([tmp_path], output, lambda _: None)).items():
        true_s = -SKEW_S if name == "flight_1.json" else 0.0
        assert file["offset_s"] - before[name]["offset_s"] == pytest.approx(true_s, abs=1e-6), name
        assert file["uncertainty_s"] == pytest.approx(before[name]["uncertainty_s"], abs=1e-6), name
        assert abs(file["offset_s"] - true_s) <= file["uncertainty_s"] + EPOCH_ERROR_S, name
        assert file["uncertainty_s"] < 0.1, name
    trace = json.loads(output.read_text())
    check(trace)
    events = trace["traceEvents"]
    drawn: dict[str, list[Any]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"].startswith(("all_reduce ", "send ", "receive ")):
            drawn.setdefault(event["name"], []).append(event)
    assert len([name for name in drawn if name.startswith("all_reduce")]) == 13
    for name, both in drawn.items():
        if name.startswith("all_reduce"):
            first, second = both
            assert max(first["ts"], second["ts"]) <= min(first["ts"] + first["dur"], second["ts"] + second["dur"])
            assert "/tests/process/test_trace.py:" in first["args"]["caller"]
    assert {name for name in drawn if name.startswith("send")} == {f"send {2 * k + 1} to 1" for k in range(3)} | {
        f"send {2 * k + 2} to 0" for k in range(3)
    }
    arrows = [event["name"] for event in events if event["ph"] == "s" and event["cat"] == "commlayer"]
    assert (arrows.count("collective"), arrows.count("message")) == (14, 6)


def trained(rank: int, size: int, folder: str) -> None:
    with ranks.job(rank, size):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = commlayer.HookState(commlayer.Policy(priority=5), optimizer=optimizer)
        model.register_comm_hook(state, commlayer.allreduce_hook)
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        commlayer.flight_record(Path(folder, f"flight_{rank}.json"))


def test_the_trace_of_a_training_has_its_steps_and_buckets(tmp_path: Path) -> None:
    ranks.run(trained, 2, str(tmp_path))
    output = tmp_path / "all.json"
    run([tmp_path], output, lambda _: None)
    trace = json.loads(output.read_text())
    check(trace)
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted(bar["name"] for bar in drawn if bar["name"].startswith("step ")) == sorted(
        [f"step {number}" for number in (2, 3, 4)] * 2
    )
    buckets = [bar for bar in drawn if bar["name"].endswith(": bucket 0")]
    assert len(buckets) == 8
    assert {bucket["args"]["class"] for bucket in buckets} == {5}
