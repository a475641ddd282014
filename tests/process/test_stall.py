"""A rank that calls nothing: the others warn of it, and it says where it is, long before the timeout."""

from __future__ import annotations

import contextlib
import io
import logging
import time

import torch
import torch.distributed as dist

from tests import ranks

LATE = 1
WAIT_S = 3.0


def read_checkpoint() -> None:
    time.sleep(WAIT_S)


def rank_1_is_late(rank: int, size: int) -> str:
    """What this rank logs."""
    found = io.StringIO()
    logging.getLogger("commlayer").addHandler(logging.StreamHandler(found))
    with ranks.job(rank, size):
        dist.all_reduce(torch.ones(10))
        if rank == LATE:
            read_checkpoint()
        dist.all_reduce(torch.ones(7))
        with contextlib.suppress(RuntimeError):
            time.sleep(WAIT_S / 4)  # until the thread looks again
    return found.getvalue()


def test_a_late_rank_is_named_and_says_where_it_is() -> None:
    told = ranks.run(rank_1_is_late, 3, environ={"COMMLAYER_STALL_S": "1"})
    assert "rank 0 of group '0' (default_pg): all_reduce 2 of float32 [7], SUM, called in rank_1_is_late (" in told[0]
    assert f": rank {LATE} on " in told[0]
    assert " has not called it; see the warning there" in told[0]
    assert "all_reduce 2 went on after " in told[0]
    assert told[2] == ""  # one rank of each host
    assert "for this rank to call all_reduce 2 of float32 [7], SUM; its main thread is in read_checkpoint (" in told[1]
    assert "called by rank_1_is_late (" in told[1]


def test_without_the_warnings_there_is_none() -> None:
    assert ranks.run(rank_1_is_late, 2, environ={"COMMLAYER_STALL_S": "0"}) == ["", ""]


def rank_2_starts_late(rank: int, size: int) -> str:
    found = io.StringIO()
    logging.getLogger("commlayer").addHandler(logging.StreamHandler(found))
    ranks.meet("all processes run", size)
    if rank == size - 1:
        time.sleep(2 * WAIT_S)
    with ranks.job(rank, size):
        pass
    return found.getvalue()


def test_a_rank_that_does_not_come_to_the_start_is_named() -> None:
    told = ranks.run(rank_2_starts_late, 3, environ={"COMMLAYER_STALL_S": "3"})
    text = "rank 0 of group '0' has waited 3 s for rank(s) 2 at step 'describe' of the start; look at their logs"
    assert text in told[0]
    assert told[1:] == ["", ""]
