"""Leaks of many jobs in one process, and of a job that crashed."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from bench.harness.leaks import Resources
from tests import ranks

CYCLES = 100
WARM = 20
HEAP_MIB = 4.0


def _cycles(rank: int, size: int) -> str:
    before = Resources.now()
    for cycle in range(CYCLES):
        ranks.init(rank, size)
        tensor = torch.ones(50_000)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.get_future().wait()
        assert tensor[-1].item() == size
        if cycle % 10 == 0:
            dist.barrier(dist.new_group())
        dist.destroy_process_group()
        if cycle == WARM:
            before = Resources.now()
    return before.grown(Resources.now(), HEAP_MIB)


@ranks.WIRES
def test_a_hundred_jobs_in_one_process_leave_nothing(wire: dict[str, str]) -> None:
    assert ranks.run(_cycles, 2, environ=wire, timeout_s=250.0) == ["", ""]


def _crash(rank: int, size: int) -> None:
    ranks.init(rank, size)
    dist.new_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1 << 20), async_op=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _after(rank: int, size: int) -> float:
    with ranks.job(rank, size):
        tensor = torch.ones(1 << 20)
        dist.all_reduce(tensor)
        dist.barrier()
        return tensor.sum().item()


def traces() -> list[str]:
    """Files in /dev/shm and names of bells: a job could leave them on a host."""
    bells = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@cl-" in line]
    return sorted([*(str(path) for path in Path("/dev/shm").iterdir()), *bells])  # noqa: S108  # looked at, not used


@ranks.WIRES
def test_a_crashed_job_leaves_nothing_behind(wire: dict[str, str]) -> None:
    mine = set(traces())
    crashed = ranks.outcomes(_crash, 3, environ=wire)
    assert [outcome.exit_code for outcome in crashed] == [-signal.SIGKILL] * 3
    pids = [name for name in set(traces()) - mine if name.startswith("@cl-")]
    # Others may run jobs on this machine: only names of processes that are gone count.
    assert not [name for name in pids if not Path("/proc", str(int(name.split("-")[1], 16))).exists()]
    assert ranks.run(_after, 3, environ=wire) == [3.0 * (1 << 20)] * 3
