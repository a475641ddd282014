"""`HookState(within=group)`: averages in two levels, beside the plain hook."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.errors import CommError, ConfigError, PeerLostError
from tests import ranks
from tests.drift import SHAPES, check_equal, directions, hooked, mean, nmse, step_of
from tests.residual import same_bits, saved

KEEPING = ("int4", "sign", "topk:0.1")
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.05, torch.float16: 0.01}


def host_of(rank: int, size: int, per_host: int, backend: str = "gloo") -> Any:
    """The group of this rank's host. Every rank makes all groups, as torch wants it."""
    hosts = [list(range(first, first + per_host)) for first in range(0, size, per_host)]
    return [dist.new_group(host, backend=backend) for host in hosts][rank // per_host]


@dataclasses.dataclass(frozen=True)
class Program:
    """What the steps of a job do."""

    per_host: int
    sizes: list[int]
    dtype: torch.dtype
    codec: str
    bucket_bytes: int
    steps: int
    seed: int
    views: bool
    weighted: bool


def draw(seed: int) -> list[Program]:
    """Some programs."""
    chosen = random.Random(seed)
    return [
        Program(
            per_host=chosen.choice([1, 2, 3, 6]),
            sizes=[chosen.choice([chosen.randint(1, 3000), chosen.randint(1, 7)]) for _ in range(chosen.randint(1, 6))],
            dtype=chosen.choice(list(TOLERANCES)),
            codec=chosen.choice(["none", "none", "bf16", "int8", *KEEPING]),
            bucket_bytes=chosen.choice([16, 1 << 10, 1 << 14]),
            steps=chosen.randint(1, 4),
            seed=chosen.randint(0, 1 << 16),
            views=chosen.choice([False, True]),
            weighted=chosen.choice([False, True]),
        )
        for _ in range(8)
    ]


class Flat(nn.Module):
    """Its gradients are its inputs."""

    def __init__(self, sizes: list[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(1, size, dtype=dtype)) for size in sizes)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return torch.stack([(w * value).sum() for w, value in zip(self.weights, inputs, strict=True)]).sum()


def averages(rank: int, drawn: Program, within: Any) -> tuple[list[list[Tensor]], list[Tensor], int]:
    """The averages of each step, and what this rank keeps at the end."""
    model = DistributedDataParallel(
        Flat(drawn.sizes, drawn.dtype),
        bucket_cap_mb=drawn.bucket_bytes / 2**20,
        gradient_as_bucket_view=drawn.views,
    )
    state = commlayer.HookState(
        commlayer.Policy(codec=drawn.codec, exact_steps=0),
        fine=commlayer.Fine(model, []),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        within=within,
        samples=(lambda: rank + 1) if drawn.weighted else None,
    )
    model.register_comm_hook(state, commlayer.allreduce_hook)
    found = []
    for step in range(drawn.steps):
        generator = torch.Generator().manual_seed(drawn.seed + 1000 * step + rank)
        model.zero_grad()
        model([torch.randn(1, size, generator=generator).to(drawn.dtype) for size in drawn.sizes]).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    return found, [residual_of(state, parameter) for parameter in model.parameters()], state.averaged_bytes


def residual_of(state: commlayer.HookState, parameter: Tensor) -> Tensor:
    """The residual of a parameter, as `total` gives it, in float64."""
    flat = torch.zeros(parameter.numel(), dtype=torch.float64)
    for offset, values, _ in state.feedback._kept.get(parameter, ()):
        flat[offset : offset + len(values)] += values.double()
    return flat.view(parameter.shape)


def check(rank: int, size: int, programs: list[Program]) -> None:
    with ranks.job(rank, size):
        hosts = {per_host: host_of(rank, size, per_host) for per_host in (1, 2, 3, 6)}
        for drawn in programs:
            found, kept, averaged_bytes = averages(rank, drawn, hosts[drawn.per_host])
            for step in found:
                check_equal(step, size)
            expected, _, whole_bytes = averages(rank, dataclasses.replace(drawn, codec="none"), None)
            error = max(TOLERANCES[drawn.dtype], 1e-6 if drawn.codec in KEEPING else 0.0)
            if drawn.codec in KEEPING:
                for number in range(len(drawn.sizes)):
                    left = kept[number] * drawn.per_host / size
                    dist.all_reduce(left)
                    sent = torch.stack([step[number].double() for step in found]).sum(0)
                    exact = torch.stack([step[number].double() for step in expected]).sum(0)
                    torch.testing.assert_close(sent + left, exact, rtol=0, atol=30 * error, msg=f"{drawn}")
                continue
            for got, wanted in zip(found, expected, strict=True):
                for mine, theirs in zip(got, wanted, strict=True):
                    limit = {"bf16": 0.05, "int8": 0.1}.get(drawn.codec, 0.0) + 3 * error
                    torch.testing.assert_close(mine, theirs, rtol=0, atol=limit, msg=f"{drawn}")
            moved = drawn.steps * drawn.dtype.itemsize
            assert whole_bytes == sum(drawn.sizes) * moved
            assert averaged_bytes <= (sum(drawn.sizes) / drawn.per_host + len(drawn.sizes)) * moved


@pytest.mark.slow
@settings(max_examples=2, phases=[Phase.generate])
@given(st.integers(0, 1 << 32))
def test_random_programs_have_the_averages_of_the_plain_hook(seed: int) -> None:
    ranks.run(check, 6, draw(seed), environ=ranks.NETWORK)


def raises(step: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        step()


def group_for(case: str, rank: int, size: int) -> Any:
    """What this rank gives as `within`. Groups that overlap are made by their members alone."""

    def alone(*members: int) -> Any:
        return dist.new_group(list(members), backend="gloo", use_local_synchronization=True)

    if case == "uneven":
        return alone(0, 1, 2) if rank < 3 else alone(3)
    if case == "overlapping":
        made = [dist.new_group(members, backend="gloo") for members in ([0, 1], [1, 2], [2, 3])]
        return made[min(rank, 2)]
    if case == "not a member":
        return dist.new_group([0, 1], backend="gloo")
    if case == "destroyed":
        made = host_of(rank, size, 2)
        if rank == 2:
            dist.destroy_process_group(made)
        return made
    if case == "of another world":
        dist.destroy_process_group()
        ranks.init(rank, size)
        kept = host_of(rank, size, 2)
        dist.destroy_process_group()
        ranks.init(rank, size)
        return kept
    assert case == "only some ranks"
    made = host_of(rank, size, 2)
    return made if rank else None


BAD = {
    "uneven": (ConfigError, "the group of rank 3 has 1 ranks, and that of rank 0 3; all hosts must have as many"),
    "overlapping": (ConfigError, r"rank 0 has a group of the ranks \[0, 1\], and rank 1 one of \[1, 2\]"),
    "not a member": (ConfigError, "rank 2: it is not a member of the group that it was given"),
    "destroyed": (ConfigError, "rank 2: torch does not know its group, which is destroyed"),
    "of another world": (ConfigError, "rank 0: torch does not know its group"),
    "only some ranks": (RuntimeError, "ranks disagree on the operation"),  # DDP wraps that of rank 0, without within
}


@pytest.mark.parametrize("case", BAD)
@ranks.on(4, environ=ranks.NETWORK)
def test_groups_that_are_no_hosts_are_refused_on_all_ranks(rank: int, size: int, case: str) -> None:
    with ranks.job(rank, size):
        within = group_for(case, rank, size)
        model, _ = hooked(commlayer.Policy(), within=within)
        raises(lambda: step_of(model, directions(rank, 0)), *BAD[case])


@pytest.mark.parametrize("leaves", [2, 3])
@ranks.on(6, environ=ranks.NETWORK)
def test_ranks_that_leave_after_a_refusal_hold_nobody_up(rank: int, size: int, leaves: int) -> None:
    """The group of the model has fewer ranks than a host."""
    with ranks.job(rank, size):
        host, members = host_of(rank, size, 3), [0, 1, 3, 4]
        part = dist.new_group(members, backend="gloo")
        if rank in members:
            model = DistributedDataParallel(Flat([50], torch.float32), process_group=part)
            state = commlayer.HookState(process_group=part, within=host)
            model.register_comm_hook(state, commlayer.allreduce_hook)
            step = lambda: model([torch.ones(1, 50)]).sum().backward()  # noqa: E731
            raises(step, ConfigError, r"the group of rank 0 has rank 2, which is none of the ranks \[0, 1, 3, 4\]")
        if rank == leaves:
            os._exit(0)
        ranks.meet("refused", size - 1)
        os._exit(0)


@ranks.on(4, environ=ranks.NETWORK)
def test_a_group_larger_than_the_model_s_is_refused(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        part, everybody = dist.new_group([0, 1], backend="gloo"), dist.new_group(backend="gloo")
        if rank < 2:
            model = DistributedDataParallel(Flat([50], torch.float32), process_group=part)
            model.register_comm_hook(
                commlayer.HookState(process_group=part, within=everybody), commlayer.allreduce_hook
            )
            raises(lambda: model([torch.ones(1, 50)]).sum().backward(), ConfigError, "has rank 2, which is none of")
        dist.barrier()


@pytest.mark.parametrize("victim", [1, 2])
def test_a_dead_rank_is_an_error_on_all_others(victim: int) -> None:
    ended = ranks.outcomes(die, 4, victim, environ=ranks.NETWORK)
    for rank, outcome in enumerate(ended):
        if rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert outcome.error is None, outcome.error


@ranks.on(4, environ=ranks.NETWORK)
def test_an_operation_that_fails_on_one_rank_fails_the_step_on_all(rank: int, size: int) -> None:
    """Nobody waits in an all-gather for the rank without a shard."""
    with ranks.job(rank, size):
        model, state = hooked(commlayer.Policy(codec="int4"), within=host_of(rank, size, 2))
        step_of(model, directions(rank, 0))
        before = saved(state)
        agree = state.shards._agree
        if rank == 1:
            state.shards._agree = lambda failed, finite: agree(failed=True, finite=finite)  # noqa: ARG005
        raises(lambda: step_of(model, directions(rank, 1)), CommError, "an operation of this step failed on rank 1")
        assert same_bits(before, saved(state))


def steps(model: DistributedDataParallel, rank: int) -> None:
    for step in range(2, 6):
        step_of(model, directions(rank, step))


def die(rank: int, size: int, victim: int) -> None:
    ranks.init(rank, size)
    model, _ = hooked(commlayer.Policy(codec="int4"), within=host_of(rank, size, 2))
    for step in range(2):  # in the second one DDP regroups its buckets, by collectives of its own
        step_of(model, directions(rank, step))
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        steps(model, rank)
    assert caught.value.culprit == victim, str(caught.value)


@pytest.mark.parametrize("codec", ["int4", "sign", "topk:0.1"])
@ranks.on(4, environ=ranks.NETWORK)
def test_a_skipped_step_has_never_happened(rank: int, size: int, codec: str) -> None:
    """An infinite value is in the shard of one rank of each host; the residuals of all ranks stay."""
    with ranks.job(rank, size):
        model, state = hooked(commlayer.Policy(codec=codec), within=host_of(rank, size, 2))
        for step in range(3):
            step_of(model, directions(rank, step))
        before = saved(state)
        inputs = directions(rank, 3)
        if rank == 2:
            inputs[0][0, 0] = torch.inf
        assert not all(gradient.isfinite().all() for gradient in step_of(model, inputs))
        assert before
        assert same_bits(before, saved(state))


@pytest.mark.parametrize("finds_unused", [False, True], ids=["rebuilt", "kept"])
@ranks.on(4, environ=ranks.NETWORK)
def test_residuals_of_the_first_buckets_are_not_lost(rank: int, size: int, finds_unused: bool) -> None:
    """DDP regroups its buckets after the first step. A lost contribution, or a rounding error, then is of another
    rank's shard."""
    with ranks.job(rank, size):
        model, state = hooked(commlayer.Policy(codec="int4"), finds_unused=finds_unused, within=host_of(rank, size, 2))
        sums = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(3):
            for total, average, exact in zip(
                sums, step_of(model, directions(rank, step)), mean(size, step), strict=True
            ):
                total += average.double() - exact
            for number, parameter in enumerate(model.parameters()):
                left = residual_of(state, parameter) / 2
                dist.all_reduce(left)
                limit = 1e-5 if parameter.dim() > 1 else 0.02  # others travel in bf16, without a residual
                assert float((sums[number] + left).abs().max()) <= limit


@ranks.on(4, environ=ranks.NETWORK)
def test_a_state_goes_over_to_a_job_without_within(rank: int, size: int) -> None:
    """The residual of two levels is in the unit of the host's mean, and is converted."""
    with ranks.job(rank, size):
        model, state = hooked(commlayer.Policy(codec="int4"), within=host_of(rank, size, 2))
        sent = step_of(model, directions(rank, 0))[0].double()
        plain, restored = hooked(commlayer.Policy())
        restored.load_state_dict(state.state_dict())
        restored.policy = commlayer.Policy()
        sent += step_of(plain, directions(rank, 1))[0].double()
        exact = mean(size, 0)[0] + mean(size, 1)[0]
        assert nmse(sent, exact) < 1e-8


@ranks.on(4, environ=ranks.NETWORK)
def test_lost_contributions_are_sent_by_whichever_rank_has_their_shard(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        model, state = hooked(commlayer.Policy(loss_bound=0.1), within=host_of(rank, size, 2))
        step_of(model, directions(rank, 0))
        parameter = model.module.weights[0]  # it lies in the shards of both ranks of a host
        lost = directions(rank, 7)[0]
        state.feedback.keep(lost.view(-1).clone(), [parameter], [0], [(0, lost.nbytes)])
        found = step_of(model, directions(rank, 1))
        check_equal(found, size)
        expected = mean(size, 1)[0] + 2 * mean(size, 7)[0]  # in the unit of the host's mean
        torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=1e-5)
        assert not state.feedback


@pytest.mark.parametrize("codec", ["auto", "powersgd:2"])
def test_codecs_that_need_whole_buckets_are_refused(codec: Any) -> None:
    with pytest.raises(ConfigError, match="which need whole buckets"):
        commlayer.HookState(commlayer.Policy(codec=codec), within=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


@ranks.on(2, environ=ranks.NETWORK)
def test_overlap_is_refused(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        model = DistributedDataParallel(Flat([50], torch.float32), gradient_as_bucket_view=True)
        state = commlayer.HookState(within=dist.group.WORLD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        raises(lambda: commlayer.overlap(model, optimizer, state=state), ConfigError, "register_comm_hook alone")
