"""`commlayer.elastic`: the loop goes on when ranks leave or die, with one state, as if they had left."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.elastic import elastic as module
from commlayer.frontend.elastic.elastic import Job
from tests import ranks
from tests.process import elastic_job
from tests.process.elastic_job import SIZE, STEPS, Plan


@pytest.mark.parametrize("seed", range(4))
def test_killed_ranks_are_as_if_they_had_left(seed: int) -> None:
    elastic_job.check(elastic_job.random_plan(seed))


@pytest.mark.parametrize("victims", [[1, 3], [0, 2], [0, 1, 2]], ids=str)
def test_ranks_that_die_at_once(victims: list[int]) -> None:
    elastic_job.check(Plan(7, tuple((rank, 0.02) for rank in victims)))


def test_killed_ranks_of_hosts_that_share_no_memory() -> None:
    elastic_job.check(Plan(8, ((2, 0.02),)), environ={**ranks.UDP, "COMMLAYER_PEER_TIMEOUT_S": "1"})


@pytest.mark.parametrize("by_signal", [True, False], ids=["SIGTERM", "leave"])
def test_ranks_leave_at_the_next_boundary(by_signal: bool) -> None:
    leaves = ((3, 2), (0, 5), (1, 5))
    found = elastic_job.reports(Plan(leaves=leaves, by_signal=by_signal))
    assert [0 if each is None else len(each.history) for each in found] == [6, 6, STEPS, 3]
    last = found[2]
    assert last is not None
    assert [len(members) for members in last.history] == [4] * 3 + [3] * 3 + [1] * 6
    assert last.history[3:7] == [(0, 1, 2)] * 3 + [(2,)]


def test_all_ranks_leave_at_once() -> None:
    found = elastic_job.reports(Plan(leaves=tuple((rank, 4) for rank in range(SIZE)), min_size=3))
    assert [each and len(each.history) for each in found] == [5] * SIZE
    assert len({each.digest for each in found if each}) == 1


def begin(rank: int, size: int, **options: Any) -> tuple[nn.Parameter, Job]:
    """A job with one parameter, whose gradient is the loss's factor."""
    os.environ.setdefault("COMMLAYER_PEER_TIMEOUT_S", "1")
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    parameter = nn.Parameter(torch.zeros(3))
    model = nn.Module()
    model.weight = parameter
    return parameter, commlayer.elastic(model, torch.optim.SGD([parameter], lr=1.0), **options)


@pytest.mark.parametrize("behind", [[0], [1], [0, 1], [1, 3], [0, 1, 3], []], ids=str)
def test_a_step_is_made_by_all_or_by_none(behind: list[int]) -> None:
    """Rank 2 dies after the all-reduce of step 2, of which the ranks `behind` do not learn the end."""
    ended = ranks.outcomes(_die_within_a_step, SIZE, behind)
    assert ended[2].exit_code == -signal.SIGKILL
    by_four, by_three = (1 + 2 + 3 + 4) / 4, (1 + 2 + 4) / 3
    for rank in (0, 1, 3):
        assert not ended[rank].error, ended[rank].error
        made, value = ended[rank].result
        assert value == ended[0].result[1]
        if behind == [0, 1, 3]:  # none has made it, so all make it anew
            assert made == [True, False, True, True]
            assert value == pytest.approx(-(by_four + 2 * by_three))
        else:  # who had made it failed in the next one
            assert made == ([True, True, True] if rank in behind else [True, True, False, True])
            assert value == pytest.approx(-(2 * by_four + by_three))


def _die_within_a_step(rank: int, size: int, behind: list[int]) -> tuple[list[bool], float]:
    parameter, job = begin(rank, size)
    made, real = [], dist.all_reduce

    def all_reduce(tensor: torch.Tensor, **options: Any) -> None:
        real(tensor, **options)
        if job.steps == 1 and len(job.members) == size:
            ranks.meet("reduced", size)
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank in behind:
                tensor.fill_(float("nan"))
                raise commlayer.PeerLostError("rank 2 died, says the test")

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    with job:
        for _ in job.batches(range(3)):
            (parameter * float(rank + 1)).sum().backward()
            made.append(job.step())
        assert job.steps == 3
    return made, parameter[0].item()


def _too_few(rank: int, size: int) -> None:
    parameter, job = begin(rank, size, min_size=3)

    def loop() -> None:
        for batch in job.batches(range(STEPS)):
            if batch == 2 and rank in (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            (parameter * 1.0).sum().backward()
            job.step()

    with job, pytest.raises(commlayer.PeerLostError, match=r"rank\(s\) are left .*, and min_size is 3"):
        loop()
    assert (job.steps, parameter[0].item()) == (2, -2.0)


def test_fewer_than_min_size_end_the_job_on_all() -> None:
    ended = ranks.outcomes(_too_few, SIZE)
    assert [each.exit_code for each in ended] == [0, -signal.SIGKILL, -signal.SIGKILL, 0]
    assert [each.error for each in ended if each.exit_code == 0] == [None, None]


def _distant(rank: int, size: int, resumes: bool) -> str:
    """Rank 1 stops in step 2: for the others, it is a process of another host."""
    vars(module)["host_key"] = lambda: f"host {rank}"
    parameter, job = begin(rank, size)
    try:
        with job:
            for batch in job.batches(range(4)):
                if batch == 1 and rank == 1:
                    if not resumes:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if os.fork() == 0:
                        time.sleep(6.0)
                        os.kill(os.getppid(), signal.SIGCONT)
                        os._exit(0)
                    os.kill(os.getpid(), signal.SIGSTOP)
                (parameter * 1.0).sum().backward()
                job.step()
    except commlayer.PeerLostError as error:
        return str(error)
    assert (job.steps, job.members, parameter[0].item()) == (4, [0, 2], -4.0)
    return ""


@pytest.mark.parametrize("resumes", [False, True], ids=["killed", "frozen"])
def test_a_process_of_another_host_that_falls_silent(resumes: bool) -> None:
    ended = ranks.outcomes(_distant, 3, resumes, environ={**ranks.UDP, "COMMLAYER_PEER_TIMEOUT_S": "1"})
    assert [ended[rank].error for rank in (0, 2)] == [None, None]
    if resumes:
        assert "rank(s) 0, 2 took this rank for dead and have gone on without it" in ended[1].result


@ranks.on(3)
def test_nobody_outlives_the_store(rank: int, size: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 1 else None
    if store is not None:
        ranks.store().set("port", str(store.port))
    port = int(ranks.store().get("port"))
    dist.init_process_group(
        "commlayer",
        store=dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5)),
        rank=rank,
        world_size=size,
    )
    model = nn.Linear(3, 1)
    job = commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def loop() -> None:
        for batch in job.batches(range(4)):
            if batch == 2 and rank == 1:
                os._exit(0)
            model(torch.ones(3)).sum().backward()
            job.step()

    with job, pytest.raises(commlayer.CommError, match="the job's Store does not answer"):
        loop()


@ranks.on(2)
def test_what_it_cannot_serve_is_refused(rank: int, size: int) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(commlayer.ConfigError, match="WORLD is not one of commlayer"):
        commlayer.elastic(model, optimizer)
    ranks.init(rank, size)
    for min_size in (0, 3):
        with pytest.raises(commlayer.ConfigError, match=f"min_size={min_size}.*: use 1 to 2"):
            commlayer.elastic(model, optimizer, min_size=min_size)
    with pytest.raises(commlayer.ConfigError, match="bfloat16 on cpu"):
        commlayer.elastic(nn.Linear(2, 1, dtype=torch.bfloat16), optimizer)
    with pytest.raises(commlayer.ConfigError, match="broadcasts buffers"):
        commlayer.elastic(DistributedDataParallel(nn.BatchNorm1d(2)), optimizer)
    with pytest.raises(commlayer.ConfigError, match="process group of its own"):
        commlayer.elastic(DistributedDataParallel(model, process_group=dist.new_group()), optimizer)
    with pytest.raises(commlayer.ClosedError, match="did not call"), commlayer.elastic(model, optimizer) as job:
        list(job.batches(range(2)))
    dist.destroy_process_group()


@ranks.on(2)
def test_the_model_of_ddp_averages_by_itself_again_afterwards(rank: int, size: int) -> None:
    ranks.init(rank, size)
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with commlayer.elastic(model, optimizer) as job:
            for _ in job.batches(range(3)):
                model(torch.full((1, 2), float(rank))).sum().backward()
                job.step()
        for _ in range(3):
            model.zero_grad()
            model(torch.full((1, 2), float(rank))).sum().backward()
            assert model.module.weight.grad.eq(0.5).all()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    dist.destroy_process_group()
