"""The Store's process dies; and jobs that start again with another Store, with more ranks or fewer."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from tests import ranks

from .scene import SLACK_S, Seen, mark, note, survived


def _serve(rank: int, size: int) -> Any:
    """The last rank is no rank: it is the Store, and dies when it is told to."""
    meeting = ranks.store()
    if rank == size - 1:
        served = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        meeting.set("port", str(served.port))
        meeting.wait(["kill the store"])
        mark()
        meeting.set("store is dead", "1")
        os._exit(0)
    port = int(meeting.get("port"))
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
    ranks.init(rank, size - 1, store=store)
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    meeting.set("kill the store", "1")
    meeting.wait(["store is dead"])
    for _ in range(50):
        tensor = torch.ones(10_000)
        dist.all_reduce(tensor)
        assert tensor[0].item() == size - 1
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.new_group(range(size - 1))
    seen = Seen(type(caught.value).__name__, str(caught.value), time.monotonic() - start)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    return seen


@ranks.WIRES
def test_without_the_store_operations_go_on_and_new_groups_fail(wire: dict[str, str]) -> None:
    seen = survived(ranks.outcomes(_serve, 3, environ=wire), victim=2)
    for outcome in seen.values():
        assert outcome.error == "CommError", outcome
        assert "the job's Store does not answer: the process that serves it (rank 0, or torchrun's" in outcome.text
        assert outcome.seconds < SLACK_S
    note("store gone, new group", "one host" if not wire else "network", seen)


@ranks.WIRES
@ranks.on(3, environ="wire")
def test_a_job_may_start_again_with_more_or_fewer_ranks(rank: int, size: int) -> None:
    """Processes that live on while the job starts again with a different number of them."""
    meeting = ranks.store()
    for life, present in enumerate((size, size - 1, size, 1, size)):
        store = dist.PrefixStore("same" if life % 2 else f"life {life}", meeting)
        if rank < present:
            dist.init_process_group(
                "commlayer", store=store, rank=rank, world_size=present, timeout=timedelta(seconds=20)
            )
            for numel in (1, 100_000):
                tensor = torch.full((numel,), float(rank + 1))
                dist.all_reduce(tensor)
                assert tensor[-1].item() == present * (present + 1) / 2, life
            dist.destroy_process_group()
        meeting.add(f"ended {life}", 1)
        while meeting.add(f"ended {life}", 0) < size:
            time.sleep(0.01)


@ranks.WIRES
@ranks.on(2, environ="wire")
def test_after_a_failure_the_same_processes_start_again(rank: int, size: int) -> None:
    """A group that failed is destroyed, and the same processes make the next one."""
    for _ in range(3):
        ranks.init(rank, size)
        dist.all_reduce(torch.ones(3))
        with pytest.raises(commlayer.MismatchError):
            dist.all_reduce(torch.ones(3 + rank))
        dist.destroy_process_group()
