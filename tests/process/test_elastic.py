"""`commlayer.elastic`: the loop goes on when ranks leave or die, with one state, as if they had left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.elastic import averages
from commlayer.frontend.elastic.elastic import Job
from commlayer.frontend.group import party as module
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
    assert [0 if report is None else len(report.history) for report in found] == [6, 6, STEPS, 3]
    last = found[2]
    assert last is not None
    assert [len(members) for members in last.history] == [4] * 3 + [3] * 3 + [1] * 6
    assert last.history[3:7] == [(0, 1, 2)] * 3 + [(2,)]


def test_all_ranks_leave_at_once() -> None:
    found = elastic_job.reports(Plan(leaves=tuple((rank, 4) for rank in range(SIZE)), min_size=3))
    assert [report and len(report.history) for report in found] == [5] * SIZE
    assert len({report.digest for report in found if report}) == 1


def begin(rank: int, size: int, store: Any = None, **options: Any) -> tuple[nn.Parameter, Job]:
    """A job with one parameter, whose gradient is the loss's factor."""
    os.environ.setdefault("COMMLAYER_PEER_TIMEOUT_S", "1")
    ranks.init(rank, size, timeout=timedelta(seconds=20), **({} if store is None else {"store": store}))
    parameter = nn.Parameter(torch.zeros(3))
    model = nn.Module()
    model.weight = parameter
    return parameter, commlayer.elastic(model, torch.optim.SGD([parameter], lr=1.0), **options)


@ranks.WIRES
@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("seed", range(3))
@ranks.on(3, environ="wire")
def test_gradients_that_travel_early_give_the_same_bits(rank: int, size: int, seed: int, codec: str) -> None:
    """In random programs of layers that some batches leave out, and of several backward passes in a step."""
    ranks.init(rank, size)
    draw = random.Random(seed)
    averages.BUCKET_BYTES = draw.choice([0, 4000, 1 << 20])
    found = []
    for overlap in (True, False):
        torch.manual_seed(seed)
        layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(6))
        program, chosen = random.Random(seed + 1), random.Random(f"{seed} {rank}")
        passes, most = program.choice([1, 1, 2]), program.choice([None, 0.1])
        noise = torch.Generator().manual_seed(100 * seed + rank)
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
        with commlayer.elastic(layers, optimizer, codec=codec, clip_norm=most, overlap=overlap) as job:
            for _ in job.batches(range(6)):
                for _ in range(passes):
                    values = torch.randn(4, 20, generator=noise)
                    for layer in chosen.choices(list(layers), k=4):  # some twice, others not at all
                        values = torch.tanh(layer(values))
                    values.square().mean().backward()
                assert job.step()
                if chosen.random() < 0.3:  # on this rank alone
                    layers[0](torch.ones(20)).sum().backward()
                    optimizer.zero_grad()
        found.append(torch.cat([each.detach().flatten() for each in layers.parameters()]))
    assert torch.equal(*found)
    all_found = [torch.empty_like(found[0]) for _ in range(size)]
    dist.all_gather(all_found, found[0])
    assert all(torch.equal(each, found[0]) for each in all_found)


@ranks.on(2)
def test_a_parameter_that_is_not_averaged_is_an_error(rank: int, size: int) -> None:
    ranks.init(rank, size)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    extra = nn.Parameter(torch.ones(3))
    with pytest.raises(commlayer.ConfigError, match=r"shape \(3,\) whose gradient is not averaged"):
        commlayer.elastic(model, torch.optim.SGD([*model.parameters(), extra], lr=0.1))
    inner = nn.Sequential(DistributedDataParallel(model))
    with pytest.raises(commlayer.ConfigError, match="is within another module"):
        commlayer.elastic(inner, torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(commlayer.ConfigError), commlayer.elastic(model, optimizer) as job:
        for step in job.batches(range(2)):
            model[0].requires_grad_(step == 1)
            model(torch.ones(2, 4)).sum().backward()
            if step == 1:
                with pytest.raises(commlayer.ConfigError, match=r"shape \(4, 4\) .* was frozen"):
                    job.step()
                break
            job.step()


@ranks.on(3)
def test_others_go_on_at_once_after_an_exception(rank: int, size: int) -> None:
    """Though its process lives on."""
    parameter, job = begin(rank, size)
    ended = contextlib.suppress(KeyError) if rank == 1 else contextlib.nullcontext()
    start_s = time.monotonic()
    with ended, job:
        for step in job.batches(range(4)):
            if rank == 1 and step == 2:
                raise KeyError("a fault of the loop")
            parameter.grad = torch.full((3,), float(rank))
            job.step()
    assert time.monotonic() - start_s < 15  # of a timeout of 20
    assert job.members == ([0, 2] if rank != 1 else [0, 1, 2])
    ranks.meet("ended", size)


@pytest.mark.parametrize("steps", [3, 2], ids=["a step", "the last step"])
@pytest.mark.parametrize("behind", [[0], [1], [0, 1], [1, 3], [0, 1, 3], []], ids=str)
def test_a_step_is_made_by_all_or_by_none(behind: list[int], steps: int) -> None:
    """Rank 2 dies after the all-reduce of step 2, of which the ranks `behind` do not learn the end."""
    ended = ranks.outcomes(_die_within_a_step, SIZE, behind, steps)
    assert ended[2].exit_code == -signal.SIGKILL
    by_four, by_three = (1 + 2 + 3 + 4) / 4, (1 + 2 + 4) / 3
    for rank in (0, 1, 3):
        assert not ended[rank].error, ended[rank].error
        made, value = ended[rank].result
        assert value == ended[0].result[1]
        if behind == [0, 1, 3]:  # none has made it, so all make it anew
            assert made == [True, False, True, True][: steps + 1]
            assert value == pytest.approx(-(by_four + (steps - 1) * by_three))
        elif steps == 2:
            assert made == [True, True]
            assert value == pytest.approx(-2 * by_four)
        else:  # who had made it failed in the next one
            assert made == ([True, True, True] if rank in behind else [True, True, False, True])
            assert value == pytest.approx(-(2 * by_four + by_three))


def disturb(rank: int, size: int, job: Job, behind: list[int], *, after: int, victim: int | None = 2) -> None:
    """The ranks `behind` do not learn the end of the all-reduce that follows `after` steps; the victim dies then."""
    real, disturbed = dist.all_reduce, False

    def all_reduce(tensor: torch.Tensor, **options: Any) -> None:
        nonlocal disturbed
        real(tensor, **options)
        if job.steps == after and not disturbed:
            disturbed = True
            ranks.meet("reduced", size)
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank in behind:
                tensor.fill_(float("nan"))
                raise commlayer.PeerLostError("a rank died, says the test")

    dist.all_reduce = all_reduce  # type: ignore[assignment]


def _die_within_a_step(rank: int, size: int, behind: list[int], steps: int) -> tuple[list[bool], float]:
    parameter, job = begin(rank, size)
    disturb(rank, size, job, behind, after=1)
    made = []
    with job:
        for _ in job.batches(range(steps)):
            (parameter * float(rank + 1)).sum().backward()
            made.append(job.step())
        assert job.steps == steps
    return made, parameter[0].item()


@pytest.mark.parametrize("behind", [[0], [1, 3], [0, 1, 3]], ids=str)
def test_nobody_waits_for_a_rank_that_knows_that_all_have_made_the_last_step(behind: list[int]) -> None:
    ended = ranks.outcomes(_die_at_the_end, SIZE, behind)
    assert [ended[rank].error for rank in (0, 1, 3)] == [None] * 3
    assert {ended[rank].result for rank in (0, 1, 3)} == {-2 * (1 + 2 + 3 + 4) / 4}


def _die_at_the_end(rank: int, size: int, behind: list[int]) -> float:
    parameter, job = begin(rank, size)
    disturb(rank, size, job, behind, after=2)
    with job:
        for _ in job.batches(range(2)):
            (parameter * float(rank + 1)).sum().backward()
            assert job.step()
    ranks.meet("ended", size - 1)  # all live until then
    return parameter[0].item()


@ranks.on(SIZE)
def test_a_rank_that_leaves_and_misses_its_last_step_has_left(rank: int, size: int) -> None:
    parameter, job = begin(rank, size)
    disturb(rank, size, job, [3], after=1, victim=None)
    with job:
        for batch in job.batches(range(4)):
            if (rank, batch) == (3, 1):
                job.leave()
            (parameter * 1.0).sum().backward()
            job.step()
    assert (job.left, job.steps) == ((True, 1) if rank == 3 else (False, 4))


@ranks.on(SIZE)
def test_a_second_life_on_the_same_store(rank: int, size: int) -> None:
    for life in range(2):
        parameter, job = begin(rank, size, store=ranks.store())
        with job:
            for batch in job.batches(range(4)):
                if (rank, batch) == (3 - life, 1):
                    job.leave()
                (parameter * 1.0).sum().backward()
                job.step()
        assert job.members == [member for member in range(size) if member != 3 - life] or job.left
        assert job.left == (rank == 3 - life)
        ranks.meet(f"life {life}", size)
        if dist.is_initialized():
            dist.destroy_process_group()
        ranks.meet(f"end of life {life}", size)


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
    assert [outcome.exit_code for outcome in ended] == [0, -signal.SIGKILL, -signal.SIGKILL, 0]
    assert [outcome.error for outcome in ended if outcome.exit_code == 0] == [None, None]


@pytest.mark.parametrize("behind", [[0], [1, 3], [0, 1, 3]], ids=str)
def test_too_few_ranks_end_at_the_same_step(behind: list[int]) -> None:
    ended = ranks.outcomes(_too_few_within_a_step, SIZE, behind)
    assert [ended[rank].error for rank in (0, 1, 3)] == [None] * 3
    steps = 1 if behind == [0, 1, 3] else 2
    assert {ended[rank].result for rank in (0, 1, 3)} == {(steps, -2.5 * steps)}


def _too_few_within_a_step(rank: int, size: int, behind: list[int]) -> tuple[int, float]:
    parameter, job = begin(rank, size, min_size=SIZE)
    disturb(rank, size, job, behind, after=1)

    def loop() -> None:
        for _ in job.batches(range(4)):
            (parameter * float(rank + 1)).sum().backward()
            job.step()

    with job, pytest.raises(commlayer.PeerLostError, match=r"rank\(s\) are left .*, and min_size is 4"):
        loop()
    return job.steps, parameter[0].item()


@ranks.on(SIZE)
def test_a_repeated_batch_has_the_same_random_numbers_and_buffers(rank: int, size: int) -> None:
    begin(rank, size)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    job = commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1))
    disturb(rank, size, job, list(range(size)), after=1, victim=None)
    drawn = []
    with job:
        for _ in job.batches(range(3)):
            drawn.append(torch.rand(1).item())
            model(torch.randn(4, 2)).sum().backward()
            job.step()
    assert len(drawn) == 4
    assert len(set(drawn)) == 3
    assert drawn[1] == drawn[2]
    assert model[1].num_batches_tracked == 3


@ranks.on(2)
def test_a_parameter_without_a_gradient_on_any_rank_stays(rank: int, size: int) -> None:
    begin(rank, size)
    model = nn.ParameterList([torch.ones(3) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    with commlayer.elastic(model, optimizer) as job:
        for _ in job.batches(range(2)):
            (model[0] + (model[1] if rank == 1 else 0.0)).sum().backward()
            job.step()
    assert not model[0].eq(1.0).any()
    assert not model[1].eq(1.0).any()
    assert model[2].eq(1.0).all()
    assert model[2] not in optimizer.state


@ranks.on(2)
def test_gradients_that_the_optimizer_does_not_hold_count_once(rank: int, size: int) -> None:
    """They are averaged, and count in the norm, as those of `clip_grad_norm_(model.parameters())` do."""
    begin(rank, size)
    model = nn.ParameterList([torch.ones(3) for _ in range(2)])
    optimizer = torch.optim.SGD([model[0]], lr=0.1)
    with commlayer.elastic(model, optimizer, clip_norm=100.0) as job:
        for _ in job.batches(range(4)):
            (model[0] * (1 + rank) + model[1] * (2 + rank)).sum().backward()
            job.step()
            assert job.norm == pytest.approx((3 * 1.5**2 + 3 * 2.5**2) ** 0.5)
            assert [each.grad for each in model] == [None, None]
    assert model[1].eq(1.0).all()


def _differing(rank: int, size: int, dies: int = -1) -> tuple[Job, Callable[[], None]]:
    """A job in which rank 1 has other weights, and its loop, in which rank `dies` does."""
    begin(rank, size)
    torch.manual_seed(7 * (rank == 1))
    model = nn.Linear(2, 1)
    job = commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loop() -> None:
        for _ in job.batches(range(3)):
            model(torch.ones(2)).sum().backward()
            if rank == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            job.step()

    return job, loop


@ranks.on(3)
def test_ranks_that_begin_with_other_weights_are_left_behind(rank: int, size: int) -> None:
    job, loop = _differing(rank, size)
    with job:
        if rank == 1:
            with pytest.raises(commlayer.MismatchError, match=r"rank\(s\) 1 of the job have other parameters"):
                loop()
        else:
            loop()
            assert (job.steps, job.members) == (3, [0, 2])


def _differ_after_a_death(rank: int, size: int) -> list[int]:
    job, loop = _differing(rank, size, dies=3)
    with job, pytest.raises(commlayer.MismatchError) if rank == 1 else contextlib.nullcontext():
        loop()
    return job.members


def test_weights_are_compared_after_a_death_in_the_first_step() -> None:
    ended = ranks.outcomes(_differ_after_a_death, SIZE)
    assert [ended[rank].error for rank in (0, 1, 2)] == [None] * 3
    assert [ended[rank].result for rank in (0, 2)] == [[0, 2]] * 2


@ranks.on(2)
def test_a_signal_ends_a_forked_child(rank: int, size: int) -> None:
    parameter, job = begin(rank, size)
    with job:
        for _ in job.batches(range(2)):
            ready, runs = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(runs, b".")  # Python forgets signals that come before
                time.sleep(20.0)
                os._exit(0)
            os.read(ready, 1)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            (parameter * 1.0).sum().backward()
            job.step()
    assert not job.left


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
        store=dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20)),
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
    for clip_norm in (0, -1.0, float("nan"), "1"):
        with pytest.raises(commlayer.ConfigError, match=f"clip_norm={clip_norm!r}"):
            commlayer.elastic(model, optimizer, clip_norm=clip_norm)  # type: ignore[arg-type]
    with pytest.raises(commlayer.ConfigError, match=r"codec='int8'\): use one of none, bf16"):
        commlayer.elastic(model, optimizer, codec="int8")
    with pytest.raises(commlayer.ConfigError, match="bfloat16 on cpu"):
        commlayer.elastic(nn.Linear(2, 1, dtype=torch.bfloat16), optimizer)
    with pytest.raises(commlayer.ConfigError, match=r"broadcasts buffers; .*_buffers=False"):
        commlayer.elastic(DistributedDataParallel(nn.BatchNorm1d(2)), optimizer)
    with pytest.raises(commlayer.ConfigError, match="process group of its own"):
        commlayer.elastic(DistributedDataParallel(model, process_group=dist.new_group()), optimizer)
    with pytest.raises(commlayer.ConfigError, match="the model is sharded"):
        commlayer.elastic(FullyShardedDataParallel(nn.Linear(2, 1), device_id=torch.device("cpu")), optimizer)
    with pytest.raises(commlayer.ConfigError, match=r"LBFGS .*closure"):
        commlayer.elastic(model, torch.optim.LBFGS(model.parameters()))
    with (
        pytest.raises(commlayer.ClosedError, match="gradients of several ones cannot be gathered"),
        commlayer.elastic(model, optimizer) as job,
    ):
        list(job.batches(range(2)))
    dist.destroy_process_group()
    ranks.init(rank, size, pg_options=commlayer.Options(commlayer.Policy(loss_bound=0.1)))
    with pytest.raises(commlayer.ConfigError, match=r"WORLD has loss_bound=0\.1"):
        commlayer.elastic(model, optimizer)
    dist.destroy_process_group()


@ranks.on(2)
def test_optimizers_whose_step_is_made_elsewhere_are_refused(rank: int, size: int) -> None:
    ranks.init(rank, size)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(commlayer.ConfigError, match="ZeroRedundancyOptimizer: its steps"):
        commlayer.elastic(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    overlap = commlayer.overlap(wrapped, optimizer)
    with pytest.raises(commlayer.ConfigError, match=r"SGD: its steps .*commlayer\.overlap"):
        commlayer.elastic(wrapped, optimizer)
    overlap.remove()
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


def clip_in_the_loop(model: nn.Module, width: int) -> None:
    with commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01)) as job:
        for _ in job.batches(range(4)):
            model(torch.ones(3, width)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            job.step()  # the first one sends all gradients itself, and sees no change


@pytest.mark.parametrize("width", [4, 400], ids=["one bucket", "several"])
@ranks.on(2)
def test_clipping_in_the_loop_is_an_error_whatever_the_size_of_the_model(rank: int, size: int, width: int) -> None:
    """Each rank would clip its own gradients, before their average."""
    ranks.init(rank, size)
    averages.BUCKET_BYTES = 100_000
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    with pytest.raises(commlayer.ConfigError, match=r"was changed between .*clip by elastic\(clip_norm="):
        clip_in_the_loop(model, width)
