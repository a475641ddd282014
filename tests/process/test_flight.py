"""The flight recorder in real jobs, read by torch's own analyzer."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.tools.trace import command
from tests import ranks
from tests.world import until

TIMEOUT = timedelta(seconds=3)


def analyze(folder: Path) -> Any:
    """The database that torch's analyzer makes of the dumps in a folder."""
    found = folder / "for_analyzer"
    command.run([folder], folder / "trace.json", lambda _: None, for_analyzer=found)
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    try:
        args = JobConfig().parse_args([str(found)])
        details, version = read_dir(args)
    finally:
        gc.enable()  # read_dir turns it off
    return build_db(details, args, version)


def faults(folder: Path) -> list[Any]:
    return [
        collective
        for collective in analyze(folder).collectives
        if not collective.pass_check or collective.missing_ranks
    ]


def run_failing(body: Callable[..., Any], size: int, folder: Path, *, shared: bool = True) -> list[ranks.Outcome]:
    environ = {"COMMLAYER_FLIGHT_DIR": str(folder), "COMMLAYER_SHM": str(int(shared))}
    return ranks.outcomes(body, size, environ=environ)


def stuck_in_my_code(rank: int) -> None:
    """Waits until this rank's record is written, because the others wait for it."""
    deadline = time.monotonic() + 30
    while not Path(os.environ["COMMLAYER_FLIGHT_DIR"], f"stacks_{rank}.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def rank_2_skips(rank: int, size: int) -> None:
    ranks.init(rank, size)
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)  # the start may take longer
    if rank == 2:
        stuck_in_my_code(rank)
    else:
        dist.all_reduce(torch.ones(7))


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "network"])
def test_the_rank_that_skips_a_collective_is_named(
    tmp_path: Path, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ended = run_failing(rank_2_skips, 3, tmp_path, shared=shared)
    assert "OperationTimeoutError" in "".join(outcome.error or "" for outcome in ended)
    assert {path.name for path in tmp_path.iterdir()} >= {*(f"flight_{rank}.json" for rank in range(3)), "stacks_2.txt"}
    (fault,) = faults(tmp_path)
    assert (fault.missing_ranks, fault.collective_name, fault.collective_seq_id) == ({2}, "gloo:all_reduce", 4)
    assert fault.input_sizes == [[7]]
    assert fault.collective_frames[0]["name"] in ("all_reduce", "wrapper")  # of torch
    assert any(frame["name"] == "rank_2_skips" for frame in fault.collective_frames)
    assert "stuck_in_my_code" in (tmp_path / "stacks_2.txt").read_text()  # also says where rank 2 was meanwhile
    assert "missing ranks: {2}" in caplog.text  # the words of torchfrtrace


def rank_1_never_sends(rank: int, size: int) -> None:
    ranks.init(rank, size)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)  # the start may take longer
    if rank == 1:
        dist.send(torch.ones(4), 0)
        stuck_in_my_code(rank)
    elif rank == 0:
        dist.recv(torch.ones(4), 1)
        dist.recv(torch.ones(5), 1)


def test_the_rank_that_does_not_send_is_named(tmp_path: Path) -> None:
    run_failing(rank_1_never_sends, 3, tmp_path)
    (fault,) = faults(tmp_path)
    assert (fault.missing_ranks, fault.collective_name) == ({1}, "gloo:recv 0<-1")
    assert fault.input_sizes == []
    assert fault.output_sizes == [[5]]


def rank_1_calls_another_size(rank: int, size: int) -> None:
    ranks.init(rank, size)
    dist.all_reduce(torch.ones(10))
    dist.all_reduce(torch.ones(20 if rank == 1 else 10))


def test_the_rank_that_calls_another_size_is_named(tmp_path: Path) -> None:
    ended = run_failing(rank_1_calls_another_size, 3, tmp_path)
    assert all("MismatchError" in (outcome.error or "") for outcome in ended)
    (fault,) = faults(tmp_path)
    assert fault.collective_seq_id == 2
    # The analyzer compares with the first file that it finds, which may be that of rank 1.
    others = fault.mismatch_collectives
    assert set(others) == ({0, 2} if fault.input_sizes == [[20]] else {1})
    assert all("SIZE_OR_SYNTAX_MISMATCH" in str(other.type_of_mismatch) for other in others.values())


def every_collective(rank: int, size: int, folder: str) -> None:
    with ranks.job(rank, size):
        own, both = torch.ones(6), torch.ones(12)
        parts = [torch.ones(6), torch.ones(6)]
        for work in (False, True):
            done = [
                dist.all_reduce(own, async_op=work),
                dist.reduce(own, 1, async_op=work),
                dist.broadcast(own, 1, async_op=work),
                dist.all_gather(parts, own, async_op=work),
                dist.all_gather([torch.ones(3), torch.ones(5)], torch.ones(3 + 2 * rank), async_op=work),
                dist.all_gather_into_tensor(both, own, async_op=work),
                dist.reduce_scatter(own, parts, async_op=work),
                dist.reduce_scatter(torch.ones(3 + 2 * rank), [torch.ones(3), torch.ones(5)], async_op=work),
                dist.reduce_scatter_tensor(own, both, async_op=work),
                dist.gather(own, parts if rank == 1 else None, 1, async_op=work),
                dist.scatter(own, parts if rank == 1 else None, 1, async_op=work),
                dist.all_to_all([torch.ones(3), torch.ones(3)], [torch.ones(3), torch.ones(3)], async_op=work),
                dist.all_to_all_single(both, both.clone(), async_op=work),
                dist.barrier(async_op=work),
            ]
            for ended in done:
                if ended is not None:
                    ended.wait()
        for tag in (0, 3):
            dist.send(own, 1, tag=tag) if rank == 0 else dist.recv(own, 0, tag=tag)
        dist.recv(own) if rank == 0 else dist.send(own, 0)
        group = dist.new_group([1, 0], group_desc="pair")
        dist.all_reduce(own, group=group)
        dist.destroy_process_group(group)
        dist.barrier()
        commlayer.flight_record(Path(folder, f"flight_{rank}.json"))


def test_every_collective_passes_the_analyzer(tmp_path: Path) -> None:
    ranks.run(every_collective, 2, str(tmp_path))
    found = analyze(tmp_path)
    assert [
        str(collective) for collective in found.collectives if not collective.pass_check or collective.missing_ranks
    ] == []
    names = {collective.collective_name for collective in found.collectives}
    assert len(names) >= 12
    assert {"pair", "default_pg"} <= {group.desc for group in found.groups}
    dump = json.loads((tmp_path / "flight_1.json").read_text())
    assert (dump["rank"], dump["pid"] > 0, dump["backend"]) == (1, True, "commlayer")
    assert {entry["state"] for entry in dump["entries"]} == {"completed"}
    for entry in dump["entries"]:
        assert entry["time_created_ns"] <= entry["time_discovered_started_ns"] <= entry["time_discovered_completed_ns"]
        assert abs(entry["time_created_ns"] / 1e9 - time.time()) < 60
    reduced = next(entry for entry in dump["entries"] if entry["profiling_name"] == "gloo:all_reduce")
    assert (reduced["bytes"], reduced["input_dtypes"], reduced["reduction"]) == (24, ["float32"], "SUM")


def ask_by_signal(folder: str) -> None:
    """Sends the signal once the all-reduce of this process waits, and lets rank 1 come when the record is there."""
    group: Any = dist.group.WORLD
    until(lambda: any(call.name == "all_reduce" and call.is_running() for call in list(group._submitter.calls.latest)))
    os.kill(os.getpid(), signal.SIGUSR2)
    until(Path(folder, "stacks_0.txt").exists)
    ranks.store().set("rank 0 has its record", "1")


def asked_by_signal(rank: int, size: int, folder: str) -> None:
    with ranks.job(rank, size):
        if rank == 1:
            dist.barrier()
            ranks.store().wait(["rank 0 has its record"])
            dist.all_reduce(torch.ones(5))
            return
        dist.barrier()
        asking = threading.Thread(target=ask_by_signal, args=(folder,))
        asking.start()
        dist.all_reduce(torch.ones(5))  # blocks this thread in C: no handler in Python would run
        asking.join()


@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_signal_writes_the_record_of_a_blocked_process(tmp_path: Path, shared: str) -> None:
    environ = {"COMMLAYER_FLIGHT_DIR": str(tmp_path), "COMMLAYER_FLIGHT_SIGNAL": "usr2", "COMMLAYER_SHM": shared}
    written = tmp_path / "by_signal"
    ranks.run(asked_by_signal_and_kept, 2, str(tmp_path), str(written), environ=environ)
    dump = json.loads((written / "flight_0.json").read_text())
    assert dump["reason"] == "signal"
    last = dump["entries"][-1]
    assert (last["profiling_name"], last["state"], last["awaited_ranks"]) == ("gloo:all_reduce", "started", [1])
    assert "asked_by_signal" in (written / "stacks_0.txt").read_text()


def asked_by_signal_and_kept(rank: int, size: int, folder: str, kept: str) -> None:
    asked_by_signal(rank, size, folder)
    if rank == 0:  # the end of the process writes it again
        Path(kept).mkdir()
        for name in ("flight_0.json", "stacks_0.txt"):
            Path(kept, name).write_bytes(Path(folder, name).read_bytes())


def has_a_handler(rank: int, size: int) -> None:
    seen = []
    signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    with ranks.job(rank, size):
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.1)
    assert seen == [signal.SIGUSR2]


def test_a_handler_of_the_user_stays(tmp_path: Path) -> None:
    ranks.run(has_a_handler, 1, environ={"COMMLAYER_FLIGHT_DIR": str(tmp_path), "COMMLAYER_FLIGHT_SIGNAL": "usr2"})
    assert json.loads((tmp_path / "flight_0.json").read_text())["reason"] == "the process ends"


@ranks.on(1)
def test_without_settings_nothing_is_watched(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("commlayer-flight")]
        with pytest.raises(commlayer.ConfigError, match=r"flight_record\('/proc/none/flight_0'\): .*; name a file"):
            commlayer.flight_record("/proc/none/flight_0")
