"""`commlayer.elastic`: shares of a batch, and processes that join."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlayer
from commlayer.frontend.elastic import membership, shares
from commlayer.frontend.group import newcomers, transfer
from commlayer.frontend.group.state import State
from tests import ranks
from tests.process import elastic_joins
from tests.process.elastic_joins import SIZE, STEPS, Plan, build, loss_of


@pytest.mark.parametrize("seed", range(6))
def test_random_joins_kills_and_leaves(seed: int) -> None:
    elastic_joins.check(elastic_joins.random_plan(seed))


def test_processes_join_and_compute() -> None:
    found = elastic_joins.check(
        Plan(joins=(2, 2), pause_s=0.2, by_speed=False, waits=True)
    )  # a slow rank may get no share
    assert [each.end for each in found] == ["done"] * (SIZE + 2)
    assert [each.joined > 0 for each in found] == [False] * SIZE + [True] * 2
    assert {each.number for each in found[SIZE:]} == {SIZE, SIZE + 1}
    assert sorted(found[0].history[STEPS - 1]) == list(range(SIZE + 2))


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_processes_of_hosts_that_share_no_memory_join(codec: str) -> None:
    found = elastic_joins.check(Plan(joins=(1,), pause_s=0.1, waits=True, codec=codec), environ=ranks.UDP)
    assert found[SIZE].end == "done"
    assert found[SIZE].joined > 0


def test_a_slow_transfer_outlives_other_changes() -> None:
    """The state takes several steps; meanwhile a rank leaves, which is a new WORLD for the transfer."""
    plan = Plan(joins=(1,), leaves=((2, 4),), piece_s=0.1, pause_s=0.3, by_speed=False, waits=True)
    found = elastic_joins.check(plan)
    assert [each.end for each in found] == ["done", "done", "left", "done"]
    assert found[3].joined > 4


def test_a_process_that_keeps_too_many_averages_makes_the_others_wait() -> None:
    """The job's steps take half a second in all, and the state takes a second."""
    found = elastic_joins.check(Plan(joins=(1,), piece_s=0.1, kept=2, pause_s=0.02, waits=True))
    assert [each.end for each in found] == ["done"] * (SIZE + 1)


def _first_life(rank: int, size: int, victim: str) -> tuple[int, int, str]:
    """Rank 3 joins slowly; the victim dies in the step in which it has got the first piece."""
    elastic_joins.slow(0.05)
    model, optimizer, schedule = build(rank)
    store: Any = ranks.store()
    joins = rank == 3
    if joins:
        store.set("is there", "")
    else:
        torch.manual_seed(0)
        model, optimizer, schedule = build(0)
        ranks.init(rank, 3, timeout=timedelta(seconds=20))
        store.wait(["is there"])  # its process may start late on a busy machine, and the job has only 120 steps
    if joins and victim == "joiner":
        real = transfer.Receiving.pump

        def pump(self: transfer.Receiving, **options: Any) -> Any:
            if self.received >= 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, **options)

        transfer.Receiving.pump = pump  # type: ignore[method-assign]
    with commlayer.elastic(model, optimizer, schedule=schedule, join=store if joins else None) as job:
        sampler = job.sampler(range(64), 16)
        while sampler.epoch < 30:
            for share in sampler:
                time.sleep(0.05)
                loss_of(model, share).backward()
                job.step()
                sending = job._replica._transfers.sendings.get(3)
                if victim == "donor" and rank == 0 and sending is not None and sending._next > 2:
                    os.kill(os.getpid(), signal.SIGKILL)
    digest = elastic_joins.digest_of(model, optimizer, schedule)
    return job.steps, len(job.members), digest


@pytest.mark.parametrize("victim", ["joiner", "donor"])
def test_a_death_while_a_process_joins(victim: str) -> None:
    ended = ranks.outcomes(_first_life, 4, victim)
    dead = 3 if victim == "joiner" else 0
    assert ended[dead].exit_code == -signal.SIGKILL
    living = [each for rank, each in enumerate(ended) if rank != dead]
    assert [each.error for each in living] == [None] * 3
    assert {each.result for each in living} == {(120, 3, living[0].result[2])}


def _refused(rank: int, size: int, fault: str) -> str:
    store: Any = ranks.store()
    torch.manual_seed(rank == 2)
    model = nn.Linear(4, 3 if (rank == 2 and fault == "model") else 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 2:
        if fault == "optimizer":
            optimizer = torch.optim.AdamW(model.parameters())
        if fault == "torch":
            torch.__version__ = "1.0"  # type: ignore[assignment]
        store.wait(["stepped"])
        job = commlayer.elastic(model, optimizer, join=store, min_size=2 if fault == "min_size" else 1)
        with job, pytest.raises(commlayer.ConfigError) as caught:
            job.sampler(range(8), 3 if fault == "batch" else 4)
        store.set("refused", "")
        return str(caught.value)
    ranks.init(rank, 2)
    with commlayer.elastic(model, optimizer) as job:
        sampler = job.sampler(range(8), 4)
        while True:
            for share in sampler:
                model(torch.ones(len(share), 4)).sum().backward()
                assert job.step()
                store.set("stepped", "")
            done = torch.tensor([float(store.check(["refused"]))])
            dist.all_reduce(done, op=dist.ReduceOp.MIN)  # all loops end after the same epoch
            if done.item() and sampler.epoch >= 2:
                break
    assert job.members == [0, 1]
    dist.destroy_process_group()
    return ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "model",
            r"the model \(weight\) is float32\[3, 4\] \(trained\) here and float32\[2, 4\] \(trained\) in the job",
        ),
        ("optimizer", r"the optimizer \(AdamW\) is \[\['weight', 'bias'\]\] here and missing in the job"),
        ("torch", r"torch is 1\.0 here and "),
        ("batch", r"batch_size is 3 here and 4 in the job"),
        ("min_size", r"min_size is 2 here and 1 in the job"),
    ],
    ids=lambda each: each if each.isidentifier() else "",
)
def test_a_process_that_does_not_fit_is_refused_and_harms_nobody(fault: str, said: str) -> None:
    ended = ranks.outcomes(_refused, 3, fault)
    assert [each.error for each in ended] == [None] * 3
    assert re.search(said, ended[2].result), ended[2].result


def _fails(rank: int, size: int, fault: str) -> str:
    """Rank 2 does not become a member after all, and lives on."""
    store: Any = ranks.store()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 2:

        def load(*_: Any) -> None:
            raise MemoryError("no room for the state")

        if fault == "no room":
            State.load = load  # type: ignore[assignment, method-assign]
        else:
            vars(membership)["JOIN_S"] = 0.2
        store.wait(["opened"])
        kind = MemoryError if fault == "no room" else commlayer.OperationTimeoutError
        with pytest.raises(kind) as caught, commlayer.elastic(model, optimizer, join=store) as job:
            job.sampler(range(8), 4)
        store.set("failed", "")
        store.wait(["end"])
        return str(caught.value)
    ranks.init(rank, 2)
    with commlayer.elastic(model, optimizer) as job:
        sampler = job.sampler(range(8), 4)
        store.set("opened", "")
        if fault == "gives up":
            store.wait(["failed"])
        goes_on = "True"
        while goes_on == "True":
            for share in sampler:
                time.sleep(0.01)
                model(torch.ones(len(share), 4)).sum().backward()
                job.step()
            told = f"goes on after {sampler.epoch}"  # on both ranks alike
            if rank == 0:
                store.set(told, str(sampler.epoch < 60 or not store.check(["failed"])))
            goes_on = store.get(told).decode()
    assert store.check(["failed"])
    assert job.members == [0, 1]
    ranks.meet("stepped", 2)
    store.set("end", "")
    return ""


@pytest.mark.parametrize(("fault", "said"), [("no room", "no room"), ("gives up", "did not take this process in")])
def test_a_process_that_fails_while_it_joins_and_lives_on_stops_nobody(fault: str, said: str) -> None:
    ended = ranks.outcomes(_fails, 3, fault)
    assert [each.error for each in ended] == [None] * 3
    assert said in ended[2].result


def _differs(rank: int, size: int, fault: str) -> tuple[str, int, int]:
    """Rank 3 joins with another schedule, or rank 1 changes its learning rate by itself."""
    store: Any = ranks.store()
    joins = rank == 3
    if joins:
        store.wait(["stepped"])
    else:
        ranks.init(rank, 3)
    torch.manual_seed(rank if joins else 0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    base = 0.7 if joins and fault == "schedule" else 0.9
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: base**epoch)
    error = ""
    job = commlayer.elastic(model, optimizer, schedule=schedule, join=store if joins else None)
    try:
        with job:
            sampler = job.sampler(range(16), 8, by_speed=False)
            while sampler.epoch < 40:
                for share in sampler:
                    time.sleep(0.02)
                    if job.steps == 10 and rank == 1 and fault == "rate":
                        optimizer.param_groups[0]["lr"] = 0.5
                    model(torch.ones(len(share), 4)).sum().backward()
                    job.step()
                    store.set("stepped", "")
    except commlayer.MismatchError as caught:
        error = str(caught)
    return error, job.steps, hash(tuple(model.weight.detach().flatten().tolist()))


@pytest.mark.parametrize(
    ("fault", "culprit", "said"), [("schedule", 3, "'lr': "), ("rate", 1, r"\(here: .*'lr': 0\.5,")], ids=str
)
def test_a_rank_that_would_step_otherwise_is_left_behind(fault: str, culprit: int, said: str) -> None:
    ended = ranks.outcomes(_differs, 4 if culprit == 3 else 3, fault)
    assert [each.error for each in ended] == [None] * len(ended)
    found = [each.result for each in ended]
    assert re.search(rf"rank\(s\) {culprit} of the job have other hyperparameters .*{said}", found[culprit][0]), found
    others = [each for rank, each in enumerate(found) if rank != culprit]
    assert {each[:2] for each in others} == {("", 80)}
    assert len({each[2] for each in others}) == 1


@ranks.on(2)
def test_an_epoch_goes_on_from_a_checkpoint(rank: int, size: int) -> None:
    ranks.init(rank, size)
    seen: list[int] = []
    saved: list[Any] = []
    for life in range(2):
        parts = build(life)
        for part, state in zip(parts, saved, strict=False):
            part.load_state_dict(state)
        with commlayer.elastic(*parts[:2], schedule=parts[2]) as job:
            sampler = job.sampler(range(20), 4, seed=3)
            if life == 1:
                sampler.load(saved[3])
            for share in sampler:
                loss_of(parts[0], share).backward()
                job.step()
                seen += share
                if (life, job.steps) == (0, 2):
                    saved = copy.deepcopy([*(part.state_dict() for part in parts), sampler.state()])
                    break
    told: list[Any] = [None] * size
    dist.all_gather_object(told, seen)
    assert sorted(told[0] + told[1]) == list(range(20))
    assert parts[2].last_epoch == 5
    dist.destroy_process_group()


def _freezes(rank: int, size: int) -> float:
    """Rank 2 stands still for ever once it has asked. Returns the longest step of the others."""
    store: Any = ranks.store()
    model, optimizer, schedule = build(0)
    if rank == 2:

        def stop(*_: Any) -> None:
            store.set("asked", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

        newcomers._wait = stop  # type: ignore[assignment]
        store.wait(["stepped"])
        with commlayer.elastic(model, optimizer, schedule=schedule, join=store) as job:
            job.sampler(range(64), 16)
    ranks.init(rank, 2)
    longest_s = 0.0
    with commlayer.elastic(model, optimizer, schedule=schedule) as job:
        sampler = job.sampler(range(64), 16)
        for share in sampler:
            loss_of(model, share).backward()
            job.step()
        store.set("stepped", "")
        store.wait(["asked"])
        while sampler.epoch < 60:
            for share in sampler:
                time.sleep(0.01)
                loss_of(model, share).backward()
                begin_s = time.monotonic()
                job.step()
                longest_s = max(longest_s, time.monotonic() - begin_s)
    ranks.meet("end", 2)
    if rank == 0:
        os.kill(int(store.get("asked")), signal.SIGKILL)
    return longest_s


def test_a_process_that_freezes_after_it_has_asked_costs_one_peer_timeout() -> None:
    ended = ranks.outcomes(_freezes, 3, environ={"COMMLAYER_PEER_TIMEOUT_S": "1"})
    assert [each.error for each in ended[:2]] == [None, None]
    assert ended[2].exit_code == -signal.SIGKILL
    assert all(each.result > 0.9 for each in ended[:2])  # so it was invited


def _joins_after_a_leave(rank: int, size: int) -> tuple[int, list[int]]:
    """Rank 0 leaves before the job takes ranks. The last process joins."""
    store: Any = ranks.store()
    model = nn.Linear(4, 2)
    joins = rank == size - 1
    if joins:
        store.wait(["open 1", "open 2"])
    else:
        ranks.init(rank, size - 1, timeout=timedelta(seconds=20))
        dist.broadcast(model.weight.data, 0)
        dist.broadcast(model.bias.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlayer.elastic(model, optimizer, join=store if joins else None) as job:
        for _ in job.batches(range(0 if joins else 2)):
            if rank == 0:
                job.leave()
            model(torch.ones(1, 4)).sum().backward()
            job.step()
        if job.left:
            return job.number, job.members
        sampler, end = job.sampler(range(64), 8, by_speed=False), 0
        store.set(f"open {rank}", "")
        while not end or job.steps < end:
            for share in sampler:
                if len(sampler.shares) == size - 1 and not end:
                    end = job.steps + 3  # the same on all ranks
                time.sleep(0.02)
                model(torch.ones(len(share), 4)).sum().backward()
                job.step()
                if job.steps == end:
                    break
    return job.number, job.members


def test_a_process_that_joins_gets_a_number_that_no_rank_has_had() -> None:
    assert ranks.run(_joins_after_a_leave, 4)[1:] == [(number, [1, 2, 3]) for number in (1, 2, 3)]


def _last_leaves(rank: int, size: int) -> tuple[int, int, str]:
    """Rank 1 joins; rank 0 is asked to leave at once, long before its state has travelled."""
    elastic_joins.slow(0.05)
    store: Any = ranks.store()
    model, optimizer, schedule = build(rank)
    if rank == 1:
        store.set("started", "")
    else:
        ranks.init(0, 1)
        store.wait(["started"])
    with commlayer.elastic(model, optimizer, schedule=schedule, join=store if rank == 1 else None) as job:
        sampler = job.sampler(range(64), 16)
        while sampler.epoch < 60 and not job.left:
            for share in sampler:
                time.sleep(0.02)
                loss_of(model, share).backward()
                if len(job.members) == 2:
                    job.leave() if rank == 0 else None
                if rank == 1 and job.members == [1]:
                    return job.steps, sampler.epoch, ""
                job.step()
    return job.steps, sampler.epoch, elastic_joins.digest_of(model, optimizer, schedule)


def test_the_last_rank_with_the_state_leaves_once_another_has_it() -> None:
    ended = ranks.outcomes(_last_leaves, 2)
    assert [each.error for each in ended] == [None, None]
    assert 3 < ended[0].result[0] <= ended[1].result[0]


def _dies_within_sampler(rank: int, size: int) -> tuple[int, list[int]]:
    ranks.init(rank, size)
    model = nn.Linear(4, 2)
    with commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1)) as job:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sampler = job.sampler(range(8), 4)
        while sampler.epoch < 2:
            for share in sampler:
                model(torch.ones(len(share), 4)).sum().backward()
                job.step()
    return job.steps, job.members


def test_a_death_before_the_sampler_is_one_within_the_first_step() -> None:
    ended = ranks.outcomes(_dies_within_sampler, 3)
    assert [ended[rank].error for rank in (0, 2)] == [None, None]
    assert [ended[rank].result for rank in (0, 2)] == [(4, [0, 2])] * 2


@ranks.on(2)
def test_calls_that_make_no_sense(rank: int, size: int) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    vars(membership)["JOIN_S"] = 0.2
    with commlayer.elastic(model, optimizer, join=ranks.store()) as job:
        with pytest.raises(commlayer.ClosedError, match=r"once job\.sampler"):
            job.step()
        with pytest.raises(commlayer.OperationTimeoutError, match=r"no job on this Store took ranks within 0.2 s"):
            job.sampler(range(4), 2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    ranks.init(rank, size)
    with pytest.raises(commlayer.ConfigError, match="ReduceLROnPlateau needs metrics"):
        commlayer.elastic(model, optimizer, schedule=plateau)
    with pytest.raises(commlayer.ConfigError, match="this process has a WORLD"):
        commlayer.elastic(model, optimizer, join=ranks.store())
    with commlayer.elastic(model, optimizer) as job:
        for arguments, said in [
            ((iter([]), 2), "no samples with a number"),
            (([], 2), "no samples with a number"),
            ((range(4), 0), "batch_size=0"),
        ]:
            with pytest.raises(commlayer.ConfigError, match=said):
                job.sampler(*arguments)  # type: ignore[arg-type]
        with pytest.raises(commlayer.ConfigError, match="seed=-1"):
            job.sampler(range(4), 2, seed=-1)
        with pytest.raises(commlayer.ConfigError, match=r"batch_size is 2 on rank 0 and 3 on rank 1"):
            job.sampler(range(4), 2 + rank)
    with commlayer.elastic(model, optimizer) as job:
        job.sampler(range(4), 2)
        with pytest.raises(commlayer.ClosedError, match="has a sampler already"):
            job.sampler(range(4), 2)
        with pytest.raises(commlayer.ClosedError, match="loop over the loader itself"):
            next(job.batches(range(3)))
        with pytest.raises(commlayer.ClosedError, match=r"step\(\) without a batch"):
            job.step()
        for share in job._replica.sampler or ():
            model(torch.ones(len(share), 2)).sum().backward()
            job.step()
    ranks.meet("end", size)
    dist.destroy_process_group()
    if rank == 0:  # the job on the Store has ended
        with (
            commlayer.elastic(model, optimizer, join=ranks.store()) as job,
            pytest.raises(commlayer.ClosedError, match="the job has ended"),
        ):
            job.sampler(range(4), 2)


@ranks.on(3)
def test_the_average_is_that_of_one_process(rank: int, size: int) -> None:
    """With shares of 4 : 2 : 1, whose speeds are invented."""
    ranks.init(rank, size)
    shares.Speeds.own = property(lambda _: [400.0, 200.0, 100.0][rank])  # type: ignore[assignment]
    model, _, _ = build(5)
    alone, _, _ = build(5)
    optimizer, single = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone))
    gradients: list[torch.Tensor] = []
    for each in (optimizer, single):
        parameters = each.param_groups[0]["params"]
        each.register_step_pre_hook(
            lambda *_, parameters=parameters: gradients.append(torch.cat([each.grad.flatten() for each in parameters]))
        )
    counts = []
    with commlayer.elastic(model, optimizer) as job:
        sampler = job.sampler(range(700), 28)
        for share in sampler:
            counts.append([sampler.shares[each] for each in range(size)])
            assert len(share) == counts[-1][rank]
            alone.load_state_dict(model.state_dict())
            single.zero_grad()
            loss_of(alone, sampler._batch()).backward()
            single.step()
            loss_of(model, share).backward()
            assert job.step()
            wanted, found = gradients[-2:]
            assert torch.linalg.vector_norm(found - wanted) <= 1e-6 * torch.linalg.vector_norm(wanted)
    assert counts == [[10, 9, 9]] * shares.WINDOW + [[16, 8, 4]] * (25 - shares.WINDOW)
    dist.destroy_process_group()
