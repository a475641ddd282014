"""`HookState(samples=...)`: averages over samples and not over ranks, against one process that has all samples."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.gradients.samples import COUNT_MAX
from tests import ranks
from tests.drawn import alike
from tests.drift import check_equal, directions, hooked, step_of
from tests.process.test_disabled import DISABLED
from tests.process.training_loop import check_one_step_late, run_both, usual
from tests.residual import same_bits, total

SIZE, WIDTH = 3, 40
ERRORS = {"none": 1e-6, "f16": 2e-3, "bf16": 2e-2, "int8": 3e-2}
"""The largest relative errors of codecs that keep none."""
KEEPING = ["int4", "sign", "powersgd:2", "topk:0.1", "auto"]
Make = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """What the steps of a job do."""

    policy: commlayer.Policy
    counts: list[tuple[int, int, int]]
    """The samples of each rank, by step."""
    micro_batches: int
    seed: int


COUNTS = st.tuples(*[st.integers(0, 9)] * SIZE).filter(any)
PROGRAMS = st.builds(
    Program,
    st.builds(
        commlayer.Policy,
        codec=st.sampled_from([*ERRORS, *KEEPING]),
        deterministic=st.booleans(),
        exact_steps=st.integers(0, 2),
    )
    | st.builds(commlayer.Policy, loss_bound=st.sampled_from([0.01, 0.3])),
    st.lists(COUNTS, min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 2**16),
)


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def losses(model: nn.Module, samples: Tensor) -> Tensor:
    """The loss of each sample. Without samples, a NaN as of the mean of nothing."""
    per_sample: Tensor = model(samples).square().mean(1)
    return (
        per_sample
        if len(samples)
        else per_sample.sum() + math.nan * sum(parameter.sum() for parameter in model.parameters())
    )


def backward(model: Any, samples: Tensor, micro_batches: int) -> None:
    """The mean loss, in parts."""
    model.zero_grad()
    parts = samples.chunk(micro_batches) if len(samples) else [samples]
    for part in parts[:-1]:
        with model.no_sync():
            (losses(model, part).sum() / len(samples)).backward()
    (losses(model, parts[-1]).sum() / max(len(samples), 1)).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def check(rank: int, drawn: Program) -> None:
    """Parameters stay, so that sums over steps can be compared: what is sent and left is the mean over all samples."""
    model, alone, count = DistributedDataParallel(net(), bucket_cap_mb=0.005), net(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = commlayer.HookState(drawn.policy, optimizer=optimizer, samples=lambda: count)
    model.register_comm_hook(state, commlayer.allreduce_hook)
    sums: list[list[Any]] = [[0.0, 0.0] for _ in alone.parameters()]
    for step, counts in enumerate(drawn.counts):
        generator = torch.Generator().manual_seed(drawn.seed + step)
        samples = torch.randn(sum(counts), WIDTH, generator=generator).split(list(counts))
        count = counts[rank]
        backward(model, samples[rank], drawn.micro_batches)
        alone.zero_grad()
        losses(alone, torch.cat(samples)).mean().backward()
        ours, theirs = gradients(model), gradients(alone)
        check_equal(ours, SIZE)
        for pair, one, other in zip(sums, ours, theirs, strict=True):
            pair[0], pair[1] = pair[0] + one.double(), pair[1] + other.double()
            if drawn.policy.codec in ERRORS:
                assert float((one - other).norm() / other.norm()) <= ERRORS[drawn.policy.codec]
    for parameter, (ours, theirs) in zip(model.parameters(), sums, strict=True):
        left = residual(state, parameter)
        dist.all_reduce(left, op=dist.ReduceOp.AVG)
        limit = ERRORS.get(drawn.policy.codec, 1e-5 if parameter.dim() > 1 else ERRORS["bf16"])
        assert float((ours + left - theirs).norm() / theirs.norm()) <= limit


def residual(state: commlayer.HookState, parameter: Tensor) -> Tensor:
    """What the steps of this rank have left, of codecs and of low-rank factors."""
    powersgd = state.low_rank._powersgd
    left = total(state.feedback, parameter)
    if powersgd is not None:
        (number,) = state.feedback.numbers_of([parameter])
        left += powersgd._errors.get(number, torch.zeros_like(parameter)).view(parameter.shape)
    return left.double()


@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_drawn_programs(rank: int, size: int) -> None:
    @alike(15)
    @given(PROGRAMS)
    def run(drawn: Program) -> None:
        check(rank, drawn)

    run()


@pytest.mark.parametrize("codec", [*ERRORS, *KEEPING])
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_each_codec(rank: int, size: int, codec: Any) -> None:
    policy = commlayer.Policy(codec=codec, exact_steps=0)
    check(rank, Program(policy, [(1, 5, 2), (0, 3, 9), (4, 0, 0), (2, 2, 2)], 2, 11))


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "sign", "powersgd:2", "topk:0.1"])
@pytest.mark.parametrize("count", [3, 0.1])
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_equal_counts_change_no_bit(rank: int, size: int, codec: Any, count: float) -> None:
    policy = commlayer.Policy(codec=codec, deterministic=True)
    (plain, _), (ours, state) = hooked(policy), hooked(policy, samples=lambda: count)
    for step in range(3):
        assert same_bits(*(step_of(trainer, directions(rank, step)) for trainer in (plain, ours)))
        assert state.weight == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_other_types(rank: int, size: int, dtype: torch.dtype) -> None:
    counts = (1, 6, 3)
    model, _ = hooked(commlayer.Policy(), dtype, samples=lambda: counts[rank])
    ours = step_of(model, directions(rank, 0, dtype))
    check_equal(ours, size)
    every = [directions(member, 0, dtype) for member in range(size)]
    for one, *parts in zip(ours, *every, strict=True):
        exact = sum(n * part.double() for n, part in zip(counts, parts, strict=True)) / sum(counts)
        assert float((one - exact).norm() / exact.norm()) < 4 * torch.finfo(dtype).eps


class Trainer:
    """A training whose ranks have other counts in each step, plain or overlapped."""

    def __init__(self, rank: int, codec: Any, *, overlapped: bool, staleness: int) -> None:
        self.rank, self.count, self.seen = rank, 0, list[Tensor]()
        self.model: Any = DistributedDataParallel(net(), bucket_cap_mb=0.005, gradient_as_bucket_view=True)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        policy = commlayer.Policy(codec=codec, deterministic=True, exact_steps=0)
        state = commlayer.HookState(policy, optimizer=self.optimizer, samples=lambda: self.count)
        self.handle: Any = None
        if overlapped:
            self.handle = commlayer.overlap(self.model, self.optimizer, state=state, staleness=staleness)
        else:
            self.model.register_comm_hook(state, commlayer.allreduce_hook)

    def loss(self, step: int) -> Tensor:
        self.count = (self.rank + step) % SIZE * 2
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        return losses(self.model, torch.randn(self.count, WIDTH, generator=generator)).sum() / max(self.count, 1)

    def see_parameters(self) -> None:
        if self.handle is not None:
            self.handle.finish()
        self.seen += [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.parametrize(("codec", "staleness"), [("none", 0), ("int4", 0), ("none", 1)])
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_overlap(rank: int, size: int, codec: Any, staleness: int) -> None:
    """The steps are those of the hook, bit by bit. With staleness, two steps of other weights are in flight."""
    plain, ours = (Trainer(rank, codec, overlapped=overlapped, staleness=staleness) for overlapped in (False, True))
    if staleness:
        check_one_step_late(plain, ours)
    else:
        run_both(usual, plain, ours)


@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_pipeline(rank: int, size: int) -> None:
    counts = [2, 6, 4]
    samples = torch.randn(sum(counts), WIDTH, generator=torch.Generator().manual_seed(5))
    own, _ = dist.new_subgroups(1)
    model, alone = net(), net()
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=own)
    schedule = ScheduleGPipe(stage, 2, lambda output, _: output.square().mean())
    state = commlayer.HookState(samples=lambda: counts[rank])
    world: Any = dist.group.WORLD
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = commlayer.pipeline.attach(schedule, optimizer, world, state=state, defer=False)
    schedule.step(samples.split(counts)[rank], target=torch.zeros(counts[rank], 1))
    handle.finish()
    alone(samples).square().mean().backward()
    for one, other in zip(gradients(model), gradients(alone), strict=True):
        assert float((one - other).norm() / other.norm()) <= ERRORS["none"]


@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_loss_scale(rank: int, size: int) -> None:
    """A residual follows the scale, and keeps the weight of its own step."""
    count, sums = 0, [[torch.zeros(()), torch.zeros(())] for _ in range(4)]
    model, state = hooked(commlayer.Policy(codec="int4"), samples=lambda: count)
    for step, scale in enumerate((1.0, 1024.0, 8.0)):
        state.loss_scale, count = scale, (rank + step) % 3 + step
        ours = step_of(model, [direction * scale for direction in directions(rank, step)])
        counts = [(member + step) % 3 + step for member in range(size)]
        every = [directions(member, step) for member in range(size)]
        for pair, one, *parts in zip(sums, ours, *every, strict=True):
            exact = sum(n * part.double() for n, part in zip(counts, parts, strict=True)) / sum(counts)
            pair[0], pair[1] = pair[0] + one.double() / scale, pair[1] + exact
    for parameter, (one, exact) in zip(model.parameters(), sums, strict=True):
        left = residual(state, parameter) / scale
        dist.all_reduce(left, op=dist.ReduceOp.AVG)
        assert float((one + left - exact).norm() / exact.norm()) <= (1e-5 if parameter.dim() > 1 else ERRORS["bf16"])


@pytest.mark.parametrize("environ", [DISABLED, ranks.NETWORK], ids=["disabled", "network"])
@ranks.on(SIZE, ranks.run_job, environ="environ")
def test_join(rank: int, size: int) -> None:
    """Ranks with fewer batches: they take part with zeros, and have no weight once they return 0."""
    batches, count = rank + 1, 0
    model, alone = DistributedDataParallel(net()), net()
    model.register_comm_hook(commlayer.HookState(samples=lambda: count), commlayer.allreduce_hook)

    def samples(each: int, step: int) -> Tensor:
        return torch.randn(each + 2, WIDTH, generator=torch.Generator().manual_seed(10 * step + each))

    for optimized in (model, alone):
        optimizer = torch.optim.SGD(optimized.parameters(), lr=0.1)
        if optimized is alone:
            for step in range(size):
                optimizer.zero_grad()
                losses(alone, torch.cat([samples(member, step) for member in range(step, size)])).mean().backward()
                optimizer.step()
            continue
        with model.join():
            for step in range(batches):
                optimizer.zero_grad()
                count = rank + 2
                losses(model, samples(rank, step)).mean().backward()
                optimizer.step()
            count = 0
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def _raises() -> float:
    raise ValueError("no batch")


WRONG: list[tuple[Any, str]] = [
    (lambda: -3, "rank 1: -3; return the number of this rank's samples"),
    (lambda: math.nan, "rank 1: nan; "),
    (lambda: math.inf, "rank 1: inf; "),
    (lambda: 2 * COUNT_MAX, "rank 1: 1.8014398509481984e+16; "),
    (lambda: "seven", "rank 1: 'seven'; "),
    (lambda: True, "rank 1: True; "),
    (lambda: torch.tensor(3), "rank 1: tensor(3); "),
    (_raises, "rank 1: raised ValueError('no batch'); "),
    (lambda: None, "rank 1: None; "),
]


@pytest.mark.parametrize("environ", [DISABLED, ranks.NETWORK], ids=["disabled", "network"])
@ranks.on(SIZE, ranks.run_job, environ="environ")
def test_wrong_counts_are_the_same_error_on_all_ranks(rank: int, size: int) -> None:
    count: Any = 4
    model, state = hooked(commlayer.Policy(), samples=lambda: count)
    step_of(model, directions(rank, 0))
    assert state.weight == 1.0
    state.samples = lambda: 0
    cases = [(state.samples, "all ranks (0, 1, 2) returned 0"), *WRONG]
    for wrong, text in cases:
        model, state = hooked(commlayer.Policy(), samples=wrong if rank == 1 or wrong is cases[0][0] else lambda: 4)
        with pytest.raises(commlayer.ConfigError, match=re.escape("HookState(samples=...)")) as caught:
            step_of(model, directions(rank, 0))
        assert text in str(caught.value)
        texts: list[Any] = [None] * size
        dist.all_gather_object(texts, str(caught.value))
        assert len({*texts}) == 1
        assert isinstance(caught.value.__cause__, ValueError) == (wrong is _raises and rank == 1)


@ranks.on(2, environ=ranks.NETWORK)
def test_ranks_without_samples_are_found(rank: int, size: int) -> None:
    ranks.init(rank, size)
    model, _ = hooked(commlayer.Policy(), samples=(lambda: 3) if rank else None)
    with pytest.raises(RuntimeError, match="all_reduce") as caught:
        step_of(model, directions(rank, 0))
    assert isinstance(caught.value, commlayer.MismatchError) or "MismatchError: " in str(caught.value)
    dist.destroy_process_group()


@ranks.on(1, ranks.run_job)
def test_a_restored_state_wants_its_samples(rank: int, size: int) -> None:
    with pytest.raises(commlayer.ConfigError, match=r"HookState\(samples=8\): give a function .* lambda: len\(batch\)"):
        commlayer.HookState(samples=8)  # type: ignore[arg-type]
    model, state = hooked(commlayer.Policy(), samples=lambda: 3)
    step_of(model, directions(rank, 0))
    saved = state.state_dict()
    for function in (None, lambda: 5):
        model, state = hooked(commlayer.Policy())
        state.load_state_dict(saved)
        assert state.state_dict()["weighted"]
        state.samples = function
        if function is not None:
            step_of(model, directions(rank, 1))
            continue
        with pytest.raises(commlayer.ConfigError, match=r"was saved with samples=...: set its `samples` again"):
            step_of(model, directions(rank, 1))
