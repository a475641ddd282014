"""`commlayer.elastic` of a model that FSDP2 shards within rows of ranks: a row goes as a whole, the others go on."""

from __future__ import annotations

import json
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commlayer
from commlayer.frontend.elastic.elastic import Job
from commlayer.frontend.elastic.rows import Rows
from commlayer.frontend.group.parts import part_of
from tests import ROOT, ranks
from tests.process import elastic_job
from tests.process.elastic_job import STEPS, Plan

ROWS = {"size": 4, "shards": 2}


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))])
def test_a_row_with_a_killed_rank_is_as_if_it_had_left(seed: int) -> None:
    elastic_job.check(elastic_job.random_rows(seed))


def test_a_row_of_hosts_that_share_no_memory() -> None:
    environ = {**ranks.UDP, "COMMLAYER_PEER_TIMEOUT_S": "1"}
    elastic_job.check(Plan(8, ((2, 0.02),), **ROWS), environ=environ)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_signal", [True, False], ids=["SIGTERM", "leave"])
def test_a_row_leaves_with_one_of_its_ranks(by_signal: bool) -> None:
    found = elastic_job.reports(Plan(leaves=((3, 2), (0, 5), (1, 5)), by_signal=by_signal, size=6, shards=2))
    assert [0 if report is None else len(report.history) for report in found] == [6, 6, 3, 3, STEPS, STEPS]
    last = found[4]
    assert last is not None
    assert last.history == [tuple(range(6))] * 3 + [(0, 1, 4, 5)] * 3 + [(4, 5)] * 6


class Weights(nn.Module):
    """Its gradient is the factor of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight * factor).sum()


def begin(rank: int, size: int, model: nn.Module | None = None, **options: Any) -> tuple[Any, Job]:
    """A job of rows of two ranks."""
    os.environ.setdefault("COMMLAYER_PEER_TIMEOUT_S", "1")
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("rows", "shards"))
    sharded: Any = fully_shard(model or Weights(), mesh=mesh["shards"])
    return sharded, commlayer.elastic(sharded, torch.optim.SGD(sharded.parameters(), lr=1.0), **options)


def value_of(model: nn.Module) -> float:
    return float(part_of(next(model.parameters()))[0])


def disturb(job: Job, size: int, behind: list[int], *, part: str, victim: int) -> None:
    """In the second step the ranks `behind` do not learn the end of this part of it; the victim dies then."""
    real, disturbed = getattr(Rows, part), False

    def call(self: Rows, *given: Any, **options: Any) -> Any:
        nonlocal disturbed
        found = real(self, *given, **options)
        if job.steps == 1 and not disturbed:
            disturbed = True
            ranks.meet("reduced", size)
            if self.own == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.own in behind:
                raise commlayer.PeerLostError("a rank died, says the test")
        return found

    setattr(Rows, part, call)


def _die_within_a_step(rank: int, size: int, part: str, behind: list[int]) -> tuple[list[bool], float]:
    model, job = begin(rank, size)
    disturb(job, size, behind, part=part, victim=2)
    made: list[bool] = []
    with job:
        for _ in job.batches(range(3)):
            model(float(rank + 1)).backward()
            made.append(job.step())
        assert job.steps == 3
    return made, value_of(model)


@pytest.mark.parametrize(
    ("part", "behind"),
    [("average", [1]), ("average", [0, 5]), ("total", [4]), ("total", [0, 5]), ("total", [0, 1, 4, 5])],
    ids=str,
)
def test_a_step_is_made_by_all_rows_or_by_none(part: str, behind: list[int]) -> None:
    """Though one place of the rows has its averages and another has not."""
    ended = ranks.outcomes(_die_within_a_step, 6, part, behind)
    assert ended[2].exit_code == -signal.SIGKILL
    assert " 2 of its row, 2, 3, died" in (ended[3].error or "")
    by_three, by_two = (1 + 2 + 3 + 4 + 5 + 6) / 6, (1 + 2 + 5 + 6) / 4
    for rank in (0, 1, 4, 5):
        assert not ended[rank].error, ended[rank].error
        made, value = ended[rank].result
        if part == "average" or behind == [0, 1, 4, 5]:  # none has made it, so all make it anew
            assert made == [True, False, True, True]
            assert value == pytest.approx(-(by_three + 2 * by_two))
        else:  # a row that has made it fails in the next one, unless one of its ranks has not learned of the end
            assert made == ([True, True, True] if {rank, rank ^ 1} & set(behind) else [True, True, False, True])
            assert value == pytest.approx(-(2 * by_three + by_two))


class Dying(nn.Module):
    """Rank 2 ends in the middle of its second forward pass."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__()
        self.first, self.second = Weights(), Weights()
        self.rank, self.how, self.calls = rank, how, 0

    def forward(self, factor: float) -> torch.Tensor:
        found: torch.Tensor = self.first(factor)
        self.calls += 1
        if self.rank == 2 and self.calls == 2:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("a fault of the loop")
        other: torch.Tensor = self.second(factor)
        return found + other


def _end_in_the_forward_pass(rank: int, size: int, how: str) -> tuple[float, float, str]:
    model = Dying(rank, how)
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("rows", "shards"))["shards"]
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    start_s, text = time.monotonic(), ""
    job = commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0))
    try:
        with job:
            for _ in job.batches(range(4)):
                model(float(rank + 1)).backward()
                job.step()
    except KeyError:
        ranks.meet("ended", size)
    except commlayer.PeerLostError as error:
        text = str(error)
    else:
        assert (job.steps, job.members) == (4, [0, 1])
    elapsed_s = time.monotonic() - start_s
    if how == "raises" and rank != 2:
        ranks.meet("ended", size)  # its process lives until then
    dist.destroy_process_group()
    return value_of(model), elapsed_s, text


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_ends_in_the_forward_pass(how: str) -> None:
    ended = ranks.outcomes(_end_in_the_forward_pass, 4, how)
    assert ended[2].exit_code == (-signal.SIGKILL if how == "killed" else 0)
    for rank in (0, 1, 3):
        assert not ended[rank].error, ended[rank].error
        value, elapsed_s, text = ended[rank].result
        assert elapsed_s < 15  # of a timeout of 20
        if rank == 3:
            assert " 2 of its row, 2, 3, " in text
            assert ("died" if how == "killed" else "gave up (KeyError: 'a fault of the loop')") in text
            assert "rank(s) 0, 1 go on without it, if they are enough; end this process" in text
        else:
            assert value == pytest.approx(-(2.5 + 3 * 1.5))


def _lose_all_rows(rank: int, size: int, min_size: int, victims: list[int]) -> tuple[int, str]:
    model, job = begin(rank, size, min_size=min_size)
    text = ""
    try:
        with job:
            for batch in job.batches(range(5)):
                if batch == 2:
                    if rank in victims:
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(0.5)  # all victims are dead then
                model(1.0).backward()
                job.step()
    except commlayer.PeerLostError as error:
        text = str(error)
    assert job.steps == 2
    return job.steps, text


def test_no_row_is_whole_any_more() -> None:
    ended = ranks.outcomes(_lose_all_rows, 4, 1, [1, 2])
    for rank, mate in ((0, 1), (3, 2)):
        assert not ended[rank].error, ended[rank].error
        text = ended[rank].result[1]
        assert f" {mate} of its row" in text, text
        assert "no other row is whole; unless these have ended well, start the job again from a checkpoint" in text


def test_fewer_ranks_than_min_size_end_the_job() -> None:
    """It counts ranks, of which each row has two."""
    ended = ranks.outcomes(_lose_all_rows, 4, 3, [3])
    assert [ended[rank].error for rank in (0, 1, 2)] == [None] * 3
    for rank in (0, 1):
        assert "2 rank(s) are left ([0, 1]), and min_size is 3" in ended[rank].result[1]


def _fail_to_meet(rank: int, size: int) -> tuple[int, list[int]]:
    """Rank 1 fails at once as the others meet, and lives on. Its row meets the row of ranks 2 and 3."""
    ranks.init(rank, size, timeout=timedelta(seconds=2 * ranks.TIMEOUT_S))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("rows", "shards"))
    model: Any = fully_shard(Weights(), mesh=mesh["shards"])
    real = Rows.make

    def make(self: Rows) -> None:
        Rows.make = real  # type: ignore[method-assign]
        raise commlayer.CommError("no way to a rank, says the test")

    with commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0)) as job:
        for batch in job.batches(range(4)):
            if batch == 1 and rank == 4:
                job.leave()
            if batch == 1 and rank == 1:
                Rows.make = make  # type: ignore[method-assign]
            model(1.0).backward()
            job.step()
    return job.steps, job.members


def test_a_rank_that_fails_to_meet_the_others_is_waited_for_by_nobody() -> None:
    ended = ranks.outcomes(_fail_to_meet, 6)
    assert [each.error for each in ended] == [None] * 6
    assert [each.result for each in ended[:4]] == [(4, [0, 1, 2, 3])] * 4


SAMPLES, BATCH, EPOCHS = 32, 10, 3
STEPS_OF_EPOCH = 4
"""The last of them has two samples, for one of three rows."""


def _share(rank: int, size: int, kills: dict[int, int], leaves: dict[int, int]) -> tuple[list[int], str]:
    """How many members each step had. `kills` and `leaves`: ranks, and at which step."""
    model, job = begin(rank, size)
    store = ranks.store()
    try:
        with job:
            sampler = job.sampler(range(SAMPLES), BATCH, seed=3)
            while sampler.epoch < EPOCHS and not job.left:
                for share in sampler:
                    step, shares = job.steps, sampler.shares
                    assert shares[rank] == shares[rank ^ 1]
                    store.set(f"share {step} {list(shares)} {rank}", json.dumps(share))
                    time.sleep(0.002 * (1 + rank // 2))
                    model(sum(map(float, share)) / len(share)).backward()
                    if kills.get(rank) == step:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if leaves.get(rank) == step:
                        job.leave()
                    if job.step():
                        store.set(f"made {step}", json.dumps(list(shares)))
    except commlayer.PeerLostError as error:
        return [], str(error)
    if job.left:
        return [job.steps], ""
    history = [json.loads(store.get(f"made {step}")) for step in range(job.steps)]
    batches = [_samples(store, step, members) for step, members in enumerate(history)]
    for epoch in range(EPOCHS):
        parts = batches[epoch * STEPS_OF_EPOCH :][:STEPS_OF_EPOCH]
        assert sorted(sample for batch in parts for sample in batch) == list(range(SAMPLES))
    # As one process with the whole batches.
    assert value_of(model) == pytest.approx(-sum(sum(batch) / len(batch) for batch in batches), rel=1e-4)
    return [len(members) for members in history], ""


def _samples(store: Any, step: int, members: list[int]) -> list[int]:
    keys = [f"share {step} {members} {each}" for each in members]
    return [sample for key in keys if store.check([key]) for sample in json.loads(store.get(key))]


def test_each_epoch_has_each_sample_once() -> None:
    ended = ranks.outcomes(_share, 6, {3: 5}, {0: 8})
    assert ended[3].exit_code == -signal.SIGKILL
    assert [ended[rank].error for rank in (0, 1, 2, 4, 5)] == [None] * 5
    assert " 3 of its row" in ended[2].result[1]
    for rank in (0, 1):
        assert ended[rank].result == ([9], "")
    for rank in (4, 5):
        assert ended[rank].result == ([6] * 5 + [4] * 4 + [2] * 3, "")


def _step_together(rank: int, size: int, shards: int) -> str:
    ranks.init(rank, size)
    mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("rows", "shards"))
    model: Any = fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh["shards"])
    text = ""
    try:
        with commlayer.elastic(model, torch.optim.Muon(model.parameters())) as job:
            for _ in job.batches(range(2)):
                model(torch.ones(2, 8)).sum().backward()
                assert job.step()
    except commlayer.CommError as error:
        text = str(error)
    ranks.meet("end", size)
    return text


def test_an_optimizer_whose_step_calls_collectives_is_refused() -> None:
    """A rank that stepped by itself would wait for its row. One that hears of it later gets the other one's text."""
    found = ranks.run(_step_together, 4, 2)
    assert all("Muon.step() has called collectives of the row [" in text for text in found), found
    assert ranks.run(_step_together, 2, 1) == [""] * 2


@ranks.on(2)
def test_a_row_can_be_one_rank(rank: int, size: int) -> None:
    ranks.init(rank, size)
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("rows", "shards"))
    model: Any = fully_shard(Weights(), mesh=mesh["shards"])
    with commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0)) as job:
        for _ in job.batches(range(2)):
            model(float(rank)).backward()
            assert job.step()
    assert value_of(model) == -1.0
    dist.destroy_process_group()


def _end_at(rank: int, size: int, steps: list[int]) -> str:
    model, job = begin(rank, size)
    text = ""
    try:
        with job:
            for _ in job.batches(range(steps[rank])):
                model(1.0).backward()
                job.step()
    except commlayer.CommError as error:
        text = f"{type(error).__name__}: {error}"
    return text


def test_loops_that_end_at_other_steps_than_those_of_another_row() -> None:
    for each in ranks.outcomes(_end_at, 4, [1, 1, 2, 2], timeout_s=60):
        assert "MismatchError" in (each.result or ""), each


def test_loops_of_a_row_that_end_at_different_steps() -> None:
    """Rank 1 waits for rank 0 in its forward pass."""
    ended = ranks.outcomes(_end_at, 4, [1, 2, 2, 2], timeout_s=60)
    assert [(each.result or "").startswith("MismatchError") for each in ended] == [True, False, True, False]
    assert " 0 of its row" in (ended[1].result or ""), ended[1]


def _ask_rows_of_one_rank(rank: int, size: int) -> int:
    os.environ["COMMLAYER_PEER_TIMEOUT_S"] = "1"
    if rank == size - 1:
        net, store = Weights(), ranks.store()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        refusal = pytest.raises(commlayer.ConfigError, match="fully_shard is not used here and used in the job")
        with refusal, commlayer.elastic(net, optimizer, join=store) as job:
            job.sampler(range(8), 4)
        store.set("refused", "")
        return 0
    ranks.init(rank, size - 1, timeout=timedelta(seconds=10))
    mesh = init_device_mesh("cpu", (size - 1, 1), mesh_dim_names=("rows", "shards"))
    model: Any = fully_shard(Weights(), mesh=mesh["shards"])
    with commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0)) as job:
        for _ in job.sampler(range(8), 4):
            ranks.store().wait(["refused"])
            model(1.0).backward()
            job.step()
    return job.steps


def test_a_process_cannot_join_rows_of_one_rank() -> None:
    assert [each.result for each in ranks.outcomes(_ask_rows_of_one_rank, 3, timeout_s=60)] == [2, 2, 0]


def _leave_as_one_dies(rank: int, size: int, victim: int, part: str) -> tuple[bool, int, float, str]:
    """The row of ranks 2 and 3 is to leave in the second step. Rank 3 does not learn that it has been made."""
    model, job = begin(rank, size, clip_norm=1.0)
    text = ""
    if part == "average" and rank == victim:
        disturb(job, 1, [], part=part, victim=victim)
    elif part == "total":
        disturb(job, size, [3], part=part, victim=victim)
    try:
        with job:
            for batch in job.batches(range(3)):
                model(float(rank + 1)).backward()
                if (rank, batch) == (2, 1):
                    job.leave()
                job.step()
    except commlayer.PeerLostError as error:
        text = str(error)
    return job.left, job.steps, value_of(model), text


def test_a_row_that_leaves_has_made_its_last_step_on_all_ranks_or_on_none() -> None:
    ended = ranks.outcomes(_leave_as_one_dies, 6, 4, "total", timeout_s=60)
    left, steps, value, _ = ended[2].result
    assert (left, steps) == (True, 2)
    assert ended[3].result == (True, 2, value, "")
    for rank in (0, 1):
        assert ended[rank].result[:2] == (False, 3)


def test_a_row_that_was_to_leave_names_its_dead_rank() -> None:
    ended = ranks.outcomes(_leave_as_one_dies, 4, 2, "average", timeout_s=60)
    left, _, _, text = ended[3].result
    assert not left
    assert " 2 of its row, 2, 3, died" in text
    assert [ended[rank].result[:2] for rank in (0, 1)] == [(False, 3)] * 2


def _lose_the_group_of_a_row(rank: int, size: int, how: str) -> tuple[int, str]:
    model, job = begin(rank, size)
    real, store = Rows.tell_row, ranks.store()

    def tell_row(self: Rows, own: Any) -> Any:
        if job.steps == 2 and rank == 2 and how == "aborted":
            assert self._group_of_row is not None
            self._group_of_row.abort()
        elif job.steps == 2 and rank == 2:
            store.wait(["timed out"])
        elif job.steps == 2 and rank == 3:
            self.options._timeout = timedelta(seconds=1)  # WORLD's: that of FSDP2's groups is 30 minutes
        return real(self, own)

    Rows.tell_row = tell_row  # type: ignore[method-assign]
    text = ""
    try:
        with job:
            for _ in job.batches(range(4)):
                model(1.0).backward()
                job.step()
    except commlayer.PeerLostError as error:
        text = str(error)
    if rank == 3:
        store.set("timed out", "")
    return job.steps, text


@pytest.mark.parametrize("how", ["aborted", "does not come"])
def test_a_row_whose_group_has_failed_goes_at_once(how: str) -> None:
    """It is a group of FSDP2's, and is never made again."""
    ended = ranks.outcomes(_lose_the_group_of_a_row, 4, how, timeout_s=60)
    assert [ended[rank].result for rank in (0, 1)] == [(4, "")] * 2
    assert " 2 of its row, 2, 3, " in ended[3].result[1]
    assert "its row, 2, 3" in ended[2].result[1]


class Distance(Weights):
    """Its gradient depends on the weights."""

    def forward(self, factor: float) -> torch.Tensor:
        return 0.1 * ((self.weight - factor) ** 2).sum()


@ranks.on(4)
def test_a_forward_pass_without_a_backward_pass_leaves_no_old_weights(rank: int, size: int) -> None:
    """The next step, in which this row may have no samples, changes them."""
    found = []
    for evaluates in (False, True):
        model, job = begin(rank, size, Distance())
        with job:
            sampler = job.sampler(range(8), 6, shuffle=False, by_speed=False)  # 6, then 2: for the first row alone
            while sampler.epoch < 2:
                for _ in sampler:
                    model(1.0).backward()
                    job.step()
                    if evaluates:
                        with torch.no_grad():
                            model(1.0)
        model.reshard()
        found.append(value_of(model))
        dist.destroy_process_group()
    assert found[0] == found[1]


@ranks.on(4)
def test_the_steps_are_those_of_fsdp_over_two_dimensions(rank: int, size: int) -> None:
    """With the norm of all parts."""
    ranks.init(rank, size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "shards"))
    found = []
    for is_elastic in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1))
        fully_shard(model[0], mesh=mesh["shards"] if is_elastic else mesh)
        fully_shard(model, mesh=mesh["shards"] if is_elastic else mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        noise = torch.Generator().manual_seed(rank)
        norms: list[Any] = []
        if is_elastic:
            with commlayer.elastic(model, optimizer, clip_norm=0.1) as job:
                for _ in job.batches(range(4)):
                    model(torch.randn(4, 8, generator=noise)).square().mean().backward()
                    assert job.step()
                    norms.append(job.norm)
            assert (dist.get_rank(), dist.get_world_size(), job.members) == (rank, 4, [0, 1, 2, 3])
        else:
            for _ in range(4):
                model(torch.randn(4, 8, generator=noise)).square().mean().backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
        norms = [each.full_tensor().item() if hasattr(each, "full_tensor") else each for each in norms]
        found.append(torch.cat([torch.tensor(norms), *(part_of(each).flatten() for each in model.parameters())]))
    torch.testing.assert_close(*found)
    dist.destroy_process_group()


@ranks.on(6)
def test_a_row_that_begins_with_other_weights_is_left_behind(rank: int, size: int) -> None:
    model = Weights()
    with torch.no_grad():
        model.weight[3] = float(rank in (2, 3))  # in the part of rank 3
    sharded, job = begin(rank, size, model)

    def loop() -> None:
        for _ in job.batches(range(3)):
            sharded(1.0).backward()
            job.step()

    with job:
        if rank in (2, 3):
            with pytest.raises(commlayer.MismatchError, match=r"rank\(s\) 3 of the job have other parameters"):
                loop()
        else:
            loop()
            assert (job.steps, job.members) == (3, [0, 1, 4, 5])


@ranks.on(4)
def test_what_rows_cannot_serve_is_refused(rank: int, size: int) -> None:
    ranks.init(rank, size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "shards"))

    def refused(model: Any, match: str) -> None:
        with pytest.raises(commlayer.ConfigError, match=match):
            commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1)).__enter__()

    refused(fully_shard(Weights(), mesh=mesh), "a mesh of 2 dimensions.*mesh=mesh.'shards'.")
    refused(fully_shard(Weights()), "between all 4 ranks, so nobody could go on without one of them")
    apart: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(apart[0], mesh=mesh["shards"])
    refused(apart, "would train 1.weight apart: call fully_shard for the whole model")
    fully_shard(apart, mesh=mesh["rows"])
    refused(apart, "has 2 meshes in this model")
    refused(fully_shard(Weights().double(), mesh=mesh["shards"]), "float64 on cpu")
    averaging: Any = fully_shard(Weights(), mesh=mesh["shards"])
    commlayer.compress_fsdp(averaging, commlayer.Policy(), replicate=mesh.get_group("rows"))
    refused(averaging, r"compress_fsdp\(replicate=...\) averages over the rows by itself")
    mixed = fully_shard(Weights(), mesh=mesh["shards"]) if rank < 2 else Weights()
    refused(mixed, r"on some ranks, but not on rank\(s\) 2, 3: call it alike")
    uneven = [dist.new_group([0]), dist.new_group([1, 2, 3])][rank > 0]
    from torch.distributed.device_mesh import DeviceMesh

    own = DeviceMesh.from_group(uneven, "cpu")
    refused(fully_shard(Weights(), mesh=own), r"meshes have the ranks \[0\], \[1, 2, 3\]: each rank must be in one")
    model: Any = fully_shard(Weights(), mesh=mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlayer.elastic(model, optimizer) as job:
        with pytest.raises(commlayer.ConfigError, match=r"batch_size is 5, .* use a multiple of 2, as 4"):
            job.sampler(range(8), 5)
        with pytest.raises(commlayer.ConfigError, match=r"the number of samples is 9, .* use a multiple of 2, as 8"):
            job.sampler(range(9), 4)
        for _ in job.batches(range(1)):
            model(1.0).backward()
            job.step()
    dist.destroy_process_group()


def _ask_for_a_wrong_batch(rank: int, size: int) -> str:
    with pytest.raises(commlayer.CommError) as error, begin(rank, size)[1] as job:
        job.sampler(range(8), 5)
    return str(error.value)


def test_all_ranks_hear_of_a_mistake_that_all_have_made() -> None:
    """Those that begin sooner do not end the meeting of the others."""
    found = ranks.results(ranks.outcomes(_ask_for_a_wrong_batch, 4), ())
    assert all("use a multiple of 2" in text for text in found), found


def _run_the_page(rank: int, size: int) -> dict[str, Any]:
    """The blocks of the page, in a script that has what they leave to the reader. The last two ranks join."""
    page = (ROOT / "docs/elastic.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n((?:(?!```).)*?fully_shard.*?)^```$", page, re.M | re.S)
    first, joining = [each for each in found if "init_device_mesh" in each]
    loop = first[first.index("    while sampler.epoch") :]
    joins = rank >= size - 2
    block = joining.replace("    ...  # as above\n", loop) if joins else first
    store = ranks.store()
    store.wait(["begun"]) if joins else None

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        store.set("begun", "")
        time.sleep(0.01 if len(names["job"].members) == size else 0.3)
        return nn.functional.mse_loss(outputs, targets)

    torch.manual_seed(joins)
    names: dict[str, Any] = {
        "torch": torch,
        "commlayer": commlayer,
        "init_device_mesh": init_device_mesh,
        "fully_shard": fully_shard,
        "store": store,
        "rank": rank,
        "size": size - 2,
        "rows": size // 2 - 1,
        "shards": 2,
        "place": rank % 2,
        "model": nn.Linear(3, 1),
        "loss": loss,
        "dataset": [(torch.randn(3), torch.ones(1)) for _ in range(24 * 40)],
    }
    exec(block, names)  # noqa: S102  # our own page
    dist.destroy_process_group()
    return {"steps": names["job"].steps, "epoch": names["sampler"].epoch, "bias": part_of(names["model"].bias).tolist()}


def test_the_script_of_the_page_trains() -> None:
    found = ranks.run(_run_the_page, 6)
    assert [(each["steps"], each["epoch"]) for each in found] == [(80, 2)] * 6
    assert found[0] == found[2] == found[4]
    assert found[1] == found[3] == found[5]
    assert found[0]["bias"] != found[1]["bias"] == []
