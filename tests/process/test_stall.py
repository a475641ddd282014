"""A rank that calls nothing: the others warn of it, and tell where it is, long before the timeout."""

import io
import logging
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tests import ranks
from tests.world import until

LATE = 1
STALL = {"COMMLAYER_STALL_S": "3"}
"""Ranks that call together come within less, on a busy machine, too."""
WENT_ON = " went on after "


class Warnings(logging.StreamHandler[io.StringIO]):
    """The log of this rank, which tells the other ranks that it has some."""

    def __init__(self, rank: int) -> None:
        super().__init__(io.StringIO())
        self._rank = rank
        self._meeting = ranks.store()  # another thread than that of the test uses it
        logging.getLogger("commlayer").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self._meeting.set(f"rank {self._rank} has warned", "1")

    @property
    def text(self) -> str:
        return self.stream.getvalue()


def read_checkpoint(meeting: dist.Store, warning: Sequence[int]) -> None:
    """Waits until these ranks have warned, or a while."""
    meeting.wait([f"rank {rank} has warned" for rank in warning])
    time.sleep(0.0 if warning else 1.0)


def rank_1_is_late(rank: int, size: int, warning: Sequence[int]) -> str:
    """What this rank logs."""
    log, meeting = Warnings(rank), ranks.store()
    with ranks.job(rank, size):
        dist.all_reduce(torch.ones(10))
        if rank == 0:
            meeting.set("rank 0 calls", "1")
        elif rank == LATE:
            read_checkpoint(meeting, warning)
        else:
            meeting.wait(["rank 0 calls"])
        dist.all_reduce(torch.ones(7))
        if warning and rank == 0:
            until(lambda: WENT_ON in log.text)
        ranks.meet("all have warned", size)
    return log.text


def test_a_late_rank_is_named_and_says_where_it_is() -> None:
    told = ranks.run(rank_1_is_late, 3, [0, LATE], environ=STALL)
    assert "rank 0 of group '0' (default_pg): all_reduce 2 of float32 [7], SUM, called in rank_1_is_late (" in told[0]
    assert f": rank {LATE} on " in told[0]
    assert " has not called it; see the warning there" in told[0]
    assert "all_reduce 2 went on after " in told[0]
    assert told[2] == ""  # one rank of each host
    assert "for this rank to call all_reduce 2 of float32 [7], SUM; its main thread is in read_checkpoint (" in told[1]
    assert "called by rank_1_is_late (" in told[1]


def rank_1_does_not_send(rank: int, size: int) -> str:
    """What this rank logs."""
    log, meeting = Warnings(rank), ranks.store()
    got = torch.empty(5)
    with ranks.job(rank, size):
        dist.all_reduce(torch.ones(10))
        if rank == 0:
            dist.recv(got, src=LATE, tag=7)
        elif rank == LATE:
            dist.send(torch.ones(5), dst=2, tag=8)
            read_checkpoint(meeting, [0, 2])
            dist.send(torch.ones(5), dst=0, tag=7)
            dist.send(torch.ones(5), dst=2)
        else:
            dist.recv(torch.empty(5), src=LATE, tag=8)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, LATE)]):
                work.wait()
        if rank != LATE:
            until(lambda: WENT_ON in log.text)
        ranks.meet("all have warned", size)
    return log.text


def test_a_rank_that_does_not_send_is_named() -> None:
    told = ranks.run(rank_1_does_not_send, 3, environ=STALL)
    assert "rank 0 of group '0' (default_pg): receive 1 of float32 [5] from rank 1, tag 7, called in " in told[0]
    assert "rank 2 of group '0' (default_pg): receive 2 of float32 [5] from rank 1, called in " in told[2]
    for text, number in ((told[0], 1), (told[2], 2)):
        assert f": rank {LATE} on " in text
        assert " has not called the matching send; " in text
        assert "; its main thread is in read_checkpoint (" in text
        assert f": receive {number} went on after " in text
    assert "its latest send of the two ranks is send 1 of float32 [5] to rank 2, tag 8, called in " in told[2]
    assert told[1] == ""


def test_without_the_warnings_there_is_none() -> None:
    assert ranks.run(rank_1_is_late, 2, [], environ={"COMMLAYER_STALL_S": "0"}) == ["", ""]


def rank_2_starts_late(rank: int, size: int) -> str:
    log = Warnings(rank)
    ranks.meet("all processes run", size)
    if rank == size - 1:
        ranks.store().wait(["rank 0 has warned"])
    with ranks.job(rank, size):
        pass
    return log.text


def test_a_rank_that_does_not_come_to_the_start_is_named() -> None:
    told = ranks.run(rank_2_starts_late, 3, environ=STALL)
    text = "rank 0 of group '0' has waited 3 s for rank(s) 2 at step 'describe' of the start; look at their logs"
    assert text in told[0]
    assert told[1:] == ["", ""]
