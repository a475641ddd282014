"""`LocalSteps`: sites of one rank, and of several; steps are counted once, shared weights are equal bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.compress.codec import codec_of
from commlayer.frontend.group.backend import CommProcessGroup
from commlayer.frontend.local.arguments import CODECS
from commlayer.frontend.local.fragment import Part, fragments_of
from commlayer.frontend.local.site import Site
from commlayer.frontend.local.sync import Head, Sync
from commlayer.frontend.local.turns import Turns
from tests import ranks
from tests.process.hosts import LOOPBACK, on_hosts

SIZE = 3
SHAPES = ((150, 400), (100,), (33, 501))
ERRORS = {"none": 1e-5, "bf16": 2e-2, "int8": 3e-2, "int4-int8": 0.12}
"""The largest relative errors of the sum of all steps: the rounding errors of the last sync are lost."""


class Given(nn.Module):
    """A model whose gradients are given."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES)

    def values(self) -> Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.weights])

    def step(self, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
        """A step of the optimizer; returns the gradient."""
        generator = torch.Generator().manual_seed(1000 * rank + step)
        for weight in self.weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        return torch.cat([weight.grad.flatten() for weight in self.weights if weight.grad is not None])


def equal_on_all(values: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    every = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, values, group=group)
    return all(torch.equal(other, values) for other in every)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training with local steps."""

    every: int
    fragments: int
    delay: int
    codec: str
    outer: tuple[float, float] | None
    weights: tuple[int, ...] | None
    """Samples per step of each rank."""
    skipped: frozenset[tuple[int, int]]
    """(rank, step) of the steps that a GradScaler skips, or that come after the end of the rank's loop."""
    evaluated: frozenset[int]
    steps: int


@st.composite
def programs(draw: Any, *, is_weighted: bool = True) -> Program:
    """`is_weighted`: some have samples."""
    fragments = draw(st.integers(1, 3))
    every = draw(st.integers(fragments, 9))
    weights = draw(st.none() | st.tuples(*[st.integers(0, 4)] * SIZE).filter(any)) if is_weighted else None
    places = st.tuples(st.integers(0, SIZE - 1), st.integers(0, 19))
    ends = draw(st.none() | st.tuples(*[st.integers(0, 20)] * SIZE)) or (20,) * SIZE
    after = frozenset((rank, step) for rank, end in enumerate(ends) for step in range(end, 20))
    return Program(
        every,
        fragments,
        draw(st.integers(0, -(-every // fragments))),
        draw(st.sampled_from(CODECS)),
        draw(st.sampled_from([None, (1.0, 0.0), (0.7, 0.6)])),
        weights,
        draw(st.frozensets(places, max_size=8)) | after,
        draw(st.frozensets(st.integers(0, 19), max_size=3)),
        draw(st.integers(0, 20)),
    )


def check(rank: int, drawn: Program) -> None:
    model = Given()
    start, made = model.values(), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = None if drawn.weights is None else lambda: drawn.weights[rank]  # type: ignore[index]
    local = commlayer.LocalSteps(
        model, optimizer, drawn.every, drawn.fragments, drawn.outer, drawn.codec, samples, delay=drawn.delay
    )
    with local:
        for step in range(drawn.steps):
            if (rank, step) not in drawn.skipped:
                made.append(-0.1 * model.step(optimizer, rank, step))
            if step in drawn.evaluated:
                own = model.values()
                with local.averaged():
                    pass
                assert torch.equal(own, model.values())
    assert equal_on_all(model.values())
    if drawn.outer == (1.0, 0.0):  # then no step may be lost, and none counted twice
        expected = expected_of(drawn, rank, made)
        error = (model.values() - start - expected).norm() / (expected.norm() or 1.0)
        assert float(error) < ERRORS[drawn.codec], drawn


def expected_of(drawn: Program, rank: int, made: Sequence[Tensor]) -> Tensor:
    """The sum of all averages, of the steps that all ranks have made. A turn begins after the same number of own steps
    on all ranks, or at the end of a rank's loop."""
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(made))
    numbered = Given()
    size = len(numbered.values())
    torch.nn.utils.vector_to_parameters(torch.arange(size, dtype=torch.float32), numbered.parameters())
    places = [
        each.shared.long()
        for each in fragments_of(list(numbered.parameters()), drawn.fragments, commlayer.Fine(), Site())
    ]
    turns, until = Turns.of(drawn.every, drawn.fragments, drawn.delay), [torch.zeros(size, dtype=torch.float64)]
    for step in made:
        until.append(until[-1] + step)
    found = torch.zeros_like(until[0])
    for turn in range(20 * drawn.fragments // drawn.every + 1 + drawn.fragments):
        ended = [min(turns.steps(turn), count) for count in counts]
        begun = [min(max(turns.steps(turn - drawn.fragments), 0), count) for count in counts]
        weights = [
            1 if drawn.weights is None else drawn.weights[each] * (ended[each] - begun[each])
            for each in range(len(counts))
        ]
        at = places[turn % drawn.fragments]
        change = until[ended[rank]][at] - until[begun[rank]][at]
        found[at] += change * weights[rank] / (sum(weights) or 1)
    dist.all_reduce(found)
    return found


@pytest.mark.parametrize("wire", [ranks.NETWORK, {}], ids=["udp", "shm"])
@ranks.on(SIZE, ranks.run_job, environ="wire")
def test_drawn_programs(rank: int, size: int) -> None:
    @settings(
        max_examples=40, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def run(drawn: Program) -> None:
        check(rank, drawn)

    run()


@pytest.mark.parametrize("codec", CODECS)
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_each_codec(rank: int, size: int, codec: str) -> None:
    check(rank, Program(6, 2, 3, codec, (1.0, 0.0), None, frozenset({(1, 3), (1, 9)}), frozenset({4}), 17))
    check(rank, Program(6, 2, 3, codec, (1.0, 0.0), (1, 0, 7), frozenset(), frozenset(), 17))


def sync_of(group: CommProcessGroup, difference: Tensor, codec: str, weight: float | None) -> Any:
    pair = codec_of(codec).pair
    head = Head(0, 1, True, False, 1, weight or 1.0)
    parts = [Part(0, len(difference), False)]
    sync = Sync(group, head, difference, parts, pair, pair, torch.zeros(0), weight is not None, range(group.size()))
    sync.start()
    return sync.finish(), sync.counted()


@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_counted_is_what_the_owners_have_added(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    difference = torch.randn(90_000, generator=torch.Generator().manual_seed(rank))
    outcome, counted = sync_of(group, difference, "bf16", None)
    rounded = difference.bfloat16().float()
    is_own = counted == difference  # its own shard, which is not rounded
    assert torch.equal(counted[~is_own], rounded[~is_own])
    assert 0.3 < float((difference != rounded)[is_own].float().sum()) / float((difference != rounded).sum()) < 0.37
    for codec, weight in (("int4-int8", None), ("int4-int8", 3.0 + rank), ("int8", None)):
        outcome, counted = sync_of(group, difference, codec, weight)
        counted, exact = counted * (weight or 1), difference * (weight or 1)
        for tensor in (counted, exact):
            dist.all_reduce(tensor)
        total = SIZE if weight is None else sum(3.0 + member for member in range(size))
        of_sum = float((outcome.average - counted / total).norm())  # the error of the sum alone, in 8 bits
        of_all = float((outcome.average - exact / total).norm())
        assert of_sum < 0.01 * float(outcome.average.norm())
        if codec == "int4-int8":
            assert of_sum < of_all / 5


WIDE = 1200
"""Of a `Net` whose parts are long enough for a codec: short all-reduces travel as they are."""


class Net(nn.Module):
    def __init__(self, width: int = 300) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, 7))

    def forward(self, values: Tensor) -> Tensor:
        return self.layers(values)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    values = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(values) - values[:, :7]).square().mean()  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_averaging_after_each_step_of_sgd_is_ddp(rank: int, size: int) -> None:
    model, other = Net(), DistributedDataParallel(Net())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, other)]
    with commlayer.LocalSteps(model, optimizers[0], 1, 1, (1, 0), "none"):
        train(model, optimizers[0], rank, range(20))
    train(other, optimizers[1], rank, range(20))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", ["none", "int4-int8"])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_sites_of_two_ranks_train_with_ddp(rank: int, size: int, codec: str) -> None:
    """Ranks of a site have the same weights at each step; the result is that of sites of one rank with both batches."""
    sites = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    peers = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    site, between = sites[rank // 2], peers[rank % 2]
    model = DistributedDataParallel(Net(), process_group=site)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlayer.LocalSteps(model, optimizer, 4, 2, (1, 0), codec) as local:  # it finds the peers
        for step in range(10):
            train(model, optimizer, rank, [step])
            assert equal_on_all(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), site)
        with local.averaged():
            assert equal_on_all(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    ours = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert equal_on_all(ours)
    if codec == "none":
        alone = Net()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        with commlayer.LocalSteps(alone, optimizer, 4, 2, (1, 0), codec, group=between):
            for step in range(10):
                optimizer.zero_grad()
                for member in (rank // 2 * 2, rank // 2 * 2 + 1):
                    (loss_of(alone, member, step) / 2).backward()
                optimizer.step()
        theirs = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@ranks.on(2, ranks.run_gloo, environ=ranks.NETWORK)
def test_a_job_on_gloo(rank: int, size: int) -> None:
    check(rank, Program(4, 2, 2, "int4-int8", (1.0, 0.0), None, frozenset(), frozenset({5}), 11))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_compiled_models_and_grad_scalers(rank: int, size: int) -> None:
    """The scaler of rank 1 skips two steps; `torch.compile` shares the parameters."""
    model = Net()
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with commlayer.LocalSteps(compiled, optimizer, 2, 2) as local:
        for step in range(9):
            optimizer.zero_grad()
            loss = loss_of(compiled, rank, step) * (torch.inf if (rank, step) in ((1, 4), (1, 8)) else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert local.steps == 9 - 2 * rank
    assert equal_on_all(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_compiled_steps_have_the_same_bits(rank: int, size: int) -> None:
    """Our hooks of the optimizer run as they are."""
    weights = []
    for is_compiled in (False, True):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        make_step: Any = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
        with commlayer.LocalSteps(model, optimizer, 3, 2, exact_steps=2) as local:
            for step in range(8):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                make_step()
        assert local.steps == 8
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


def on_two_hosts(rank: int, size: int) -> None:
    with on_hosts(rank, size, [0, 0, 1, 1]):
        difference = torch.randn(90_000, generator=torch.Generator().manual_seed(rank))
        outcome, counted = sync_of(dist.group.WORLD, difference, "int4-int8", None)  # type: ignore[arg-type]
        assert 0 < float((difference - counted).norm()) < 0.2 * float(difference.norm())
        dist.all_reduce(counted)
        assert float((outcome.average - counted / size).norm()) < 0.01 * float(outcome.average.norm())


def test_ranks_of_one_host_count_its_sum() -> None:
    """The rank that encodes a value of its host's sum keeps the error of all, on its share of the values."""
    ranks.run(on_two_hosts, 4, environ=LOOPBACK)
