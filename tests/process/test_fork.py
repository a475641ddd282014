"""A forked child, as a DataLoader's worker, touches nothing of its parent's job, whatever it calls."""

import atexit
import gc
import os
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commlayer
from tests import ranks
from tests.process.test_abort import total, world

CHILD_S = 20


def in_child(body: Callable[[], None]) -> None:
    """Runs `body` in a forked child, which must end well."""
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)  # ends a child that hangs
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def sparse_total() -> float:
    """The sum of a sparse tensor, which gloo makes beneath the group."""
    tensor = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (2,))
    dist.all_reduce(tensor)
    return tensor.coalesce().values().item()


def destroy() -> None:
    dist.destroy_process_group()
    gc.collect()


def abort() -> None:
    group = world()
    group.abort()
    group.shutdown()


def drop() -> None:
    dist.distributed_c10d._world.pg_map.clear()
    gc.collect()


def use() -> None:
    for call in (
        total,
        sparse_total,
        dist.barrier,
        lambda: world().monitored_barrier(),
        lambda: dist.isend(torch.ones(1), (dist.get_rank() + 1) % 2),
    ):
        with pytest.raises(commlayer.ClosedError, match=rf"belongs to process {os.getppid()}.* forked"):
            call()
    with pytest.raises(commlayer.ClosedError):
        commlayer.stats()


@pytest.mark.parametrize("body", [destroy, abort, drop, use])
@ranks.WIRES
@ranks.on(2, environ="wire")
def test_a_child_leaves_the_job_alone(rank: int, size: int, body: Callable[[], None]) -> None:
    with ranks.job(rank, size):
        expected = total(), sparse_total()  # gloo's ranks are connected from here on
        if rank == 0:
            in_child(body)
        dist.barrier()
        assert (total(), sparse_total()) == expected
        world().monitored_barrier()


@ranks.on(2)
def test_an_operation_in_flight_raises_in_the_child(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        tensor = torch.ones(4)
        work = dist.irecv(tensor, 1 - rank) if rank == 0 else None

        def look() -> None:
            assert work is not None
            assert work.is_completed()
            with pytest.raises(commlayer.ClosedError, match="forked"):
                work.wait()
            with pytest.raises(Exception, match="forked"):
                work.get_future().wait()

        if work is not None:
            in_child(look)
        dist.barrier()
        if work is None:
            dist.send(tensor + 1, 1 - rank)
        else:
            work.wait()
            assert tensor[0].item() == 2.0


@ranks.on(2)
def test_a_child_makes_a_job_of_its_own(rank: int, size: int) -> None:
    with ranks.job(rank, size):

        def alone() -> None:
            dist.destroy_process_group()
            dist.init_process_group("commlayer", store=dist.HashStore(), rank=0, world_size=1)
            assert total() == 1.0
            dist.destroy_process_group()

        in_child(alone)
        assert total() == size


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """Settings with which a process holds a port and writes files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "COMMLAYER_METRICS_PORT": str(port),
        "COMMLAYER_FLIGHT_DIR": str(tmp_path / "flight"),
        "COMMLAYER_FLIGHT_SIGNAL": "usr2",
        "COMMLAYER_LOG": "info",
        "COMMLAYER_SHM": "0",
        "COMMLAYER_IFNAME": "lo",
    }


@ranks.on(2, environ="watched")
def test_ports_and_files_stay_with_the_parent(rank: int, size: int) -> None:
    """A child that outlives its parent keeps no port; one that fails, or gets the signal, writes no record."""
    with ranks.job(rank, size):
        total()
        held = own_ports()
        assert held

        def look() -> None:
            assert not held & own_ports()
            os.kill(os.getpid(), signal.SIGUSR2)
            use()
            assert not texts_at_exit()

        in_child(look)
        assert not Path(os.environ["COMMLAYER_FLIGHT_DIR"]).exists()
        dist.barrier()


def texts_at_exit() -> list[str]:
    """What this process would log at its end."""
    texts = ranks.logged()
    atexit._run_exitfuncs()
    return texts


def own_ports() -> set[str]:
    """The sockets of this process on the ports that a user may choose: UDP, and TCP on that of the metrics."""
    chosen = f":{int(os.environ['COMMLAYER_METRICS_PORT']):04X}"
    inodes = set()
    for table in ("udp", "udp6", "tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if table.startswith("udp") or (fields[1].endswith(chosen) and fields[3] == "0A"):
                inodes.add(f"socket:[{fields[9]}]")
    return inodes & {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
