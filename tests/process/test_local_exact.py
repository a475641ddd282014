"""Exact steps of `LocalSteps` on plain modules: averages beside the backward pass, by the code of DDP's hook."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commlayer
from commlayer.frontend.gradients.started import Started
from commlayer.frontend.local import bucket
from commlayer.frontend.local.bucket import Bucket
from tests import ranks
from tests.drawn import alike
from tests.gpu.lab import FakeGpu
from tests.process.test_local_state import EXACT, copied, values
from tests.process.test_local_steps import WIDE, Net, equal_on_all, loss_of, train

SIZE = 3
BYTES = 8_000
"""Of a bucket: the models here then have several."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def exact(model: nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any) -> commlayer.LocalSteps:
    """A training whose steps are all exact."""
    return commlayer.LocalSteps(model, optimizer, 4, 2, exact_steps=1000, **arguments)


def averages_of(local: commlayer.LocalSteps) -> int:
    """How often it has averaged."""
    assert local._training.exact is not None
    return local._training.exact.averages


class Drawn(nn.Module):
    """A chain of layers, some of which are frozen, unused on some ranks, or have the weights of another one."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.kinds = kinds
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in kinds)
        for layer, kind in zip(self.layers, kinds, strict=True):
            assert isinstance(layer, nn.Linear)
            if kind == "frozen":
                layer.requires_grad_(False)
            elif kind == "tied":
                layer.weight = self.layers[0].weight  # type: ignore[assignment]

    def forward(self, given: Tensor, rank: int) -> Tensor:
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            if kind != "unused" and not (kind == "sometimes" and rank == 0):
                given = torch.tanh(layer(given))
        return given


@dataclasses.dataclass(frozen=True)
class Program:
    """A training with exact steps."""

    kinds: tuple[str, ...]
    """Of the layers."""
    passes: tuple[int, ...]
    """Backward passes, by step."""
    samples: tuple[int, ...] | None
    """Of each rank in a step."""
    clips: bool
    """Whether the gradients are clipped."""
    keeps: bool
    """Whether zero_grad leaves zeros instead of None."""


@st.composite
def programs(draw: Any) -> Program:
    kinds = draw(st.lists(st.sampled_from(["plain", "plain", "frozen", "tied", "unused", "sometimes"]), max_size=4))
    steps = draw(st.integers(2, 6))
    passes = draw(
        st.sampled_from([(1,) * steps, (2,) * steps]) | st.lists(st.integers(1, 3), min_size=2, max_size=6).map(tuple)
    )
    samples = draw(st.none() | st.tuples(*[st.integers(0, 4)] * SIZE).filter(any))
    # The average of passes that are fewer than expected comes after the clip.
    return Program(
        ("plain", *kinds), passes, samples, draw(st.booleans()) and len(set(passes)) == 1, draw(st.booleans())
    )


def run(
    drawn: Program,
    model: Drawn,
    optimizer: torch.optim.Optimizer,
    rank: int,
    average: Callable[[Drawn], None] | None,
    first: int = 0,
    save: Callable[[], None] | None = None,
) -> None:
    """The training from step `first`. `average` averages the gradients in front of a step; None: LocalSteps does it.
    `save` is called in front of each step."""
    for step, passes in list(enumerate(drawn.passes))[first:]:
        if save is not None:
            save()
        optimizer.zero_grad(set_to_none=not drawn.keeps)
        for part in range(passes):
            inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(1000 * step + 10 * part + rank))
            (model(inputs, rank) - inputs).square().mean().backward()
        if average is not None:
            average(model)
        if drawn.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def check(drawn: Program, rank: int) -> None:
    """Compares with averages of one parameter after the other."""

    def average(model: Drawn) -> None:
        counts = [1] * SIZE if drawn.samples is None else drawn.samples
        weight = counts[rank] * SIZE / sum(counts)
        for parameter in model.parameters():
            has = torch.tensor([float(parameter.grad is not None)])
            dist.all_reduce(has, dist.ReduceOp.MAX)
            if has:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * weight
                dist.all_reduce(own, dist.ReduceOp.AVG)
                parameter.grad = own

    model, other = Drawn(drawn.kinds), Drawn(drawn.kinds)
    samples = None if drawn.samples is None else lambda: drawn.samples[rank]  # type: ignore[index]
    optimizer = sgd(model)
    with exact(model, optimizer, samples=samples) as local:
        run(drawn, model, optimizer, rank, None)
        assert averages_of(local) >= len(drawn.passes)
        if set(drawn.passes) == {1}:
            assert averages_of(local) == len(drawn.passes)
        elif len(set(drawn.passes)) == 1:  # known after the first step
            assert averages_of(local) == len(drawn.passes) + drawn.passes[0] - 1
    run(drawn, other, sgd(other), rank, average)
    assert equal_on_all(values(model))
    if set(drawn.passes) == {1}:
        assert torch.equal(values(model), values(other)), drawn
    else:
        assert torch.allclose(values(model), values(other), rtol=1e-4, atol=1e-6), drawn
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        assert (parameter.grad is None) == (same.grad is None), drawn


@pytest.mark.parametrize("wire", [EXACT, {"COMMLAYER_DETERMINISTIC": "1"}], ids=["udp", "shm"])
@ranks.on(SIZE, ranks.run_job, environ="wire")
def test_drawn_programs(rank: int, size: int) -> None:
    @alike(20)
    @given(programs())
    def run_all(drawn: Program) -> None:
        check(drawn, rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "BYTES", BYTES)
        run_all()


@ranks.on(SIZE, ranks.run_job, environ=EXACT)
def test_drawn_programs_have_the_same_bits_after_a_restore(rank: int, size: int) -> None:
    @alike(20)
    @given(programs(), st.sampled_from(["none", "int4", "powersgd:4"]), st.integers(0, 5))
    def run_all(drawn: Program, codec: str, at: int) -> None:
        at %= len(drawn.passes)
        samples = None if drawn.samples is None else lambda: drawn.samples[rank]  # type: ignore[index]

        def begin() -> tuple[Any, Any, Any]:
            model = Drawn(drawn.kinds)
            optimizer = sgd(model)
            policy = commlayer.Policy(codec=codec, exact_steps=1, deterministic=True)
            return model, optimizer, exact(model, optimizer, policy=policy, samples=samples)

        whole, saved = begin(), []
        with whole[2]:
            run(drawn, *whole[:2], rank, None, 0, lambda: saved.append(copied([part.state_dict() for part in whole])))
        parts = begin()
        for part, state in zip(parts, saved[at], strict=True):
            part.load_state_dict(state)
        with parts[2]:
            run(drawn, *parts[:2], rank, None, at)
        assert torch.equal(values(parts[0]), values(whole[0])), (drawn, codec, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "BYTES", BYTES)
        run_all()


CODECS = ("none", "f16", "bf16", "int8", "int4-int8", "int4", "sign", "powersgd:4", "topk:0.1")


@pytest.mark.parametrize("buckets", [1, 2])
@pytest.mark.parametrize("codec", CODECS)
@ranks.on(SIZE, ranks.run_job, environ=EXACT)
def test_a_codec_has_the_bits_of_the_hook(rank: int, size: int, codec: str, buckets: int) -> None:
    policy = commlayer.Policy(codec=codec, exact_steps=3, deterministic=True)
    model, other = Net(), DistributedDataParallel(Net(), bucket_cap_mb=BYTES / 2**20 if buckets > 1 else 25)
    optimizers = sgd(model), sgd(other)
    other.register_comm_hook(commlayer.HookState(policy, optimizer=optimizers[1]), commlayer.allreduce_hook)
    with pytest.MonkeyPatch.context() as patch:
        if buckets > 1:
            patch.setattr(bucket, "BYTES", BYTES)
        with exact(model, optimizers[0], policy=policy) as local:
            for step in range(10):
                train(model, optimizers[0], rank, [step])
                train(other, optimizers[1], rank, [step])
                assert torch.equal(values(model), values(other)), step
            assert local._training.exact is not None
            assert len(local._training.exact._buckets) == buckets
            assert f"10 exact steps so far; gradients travel in {codec.replace('none', 'float32')}" in local.explain()
    assert equal_on_all(values(model))


@pytest.mark.parametrize("allow_state", [False, True])
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_auto_chooses_codecs(rank: int, size: int, allow_state: bool) -> None:
    policy = commlayer.Policy(codec="auto", allow_state=allow_state, exact_steps=3)
    model = Net()
    optimizer = sgd(model)
    with exact(model, optimizer, policy=policy, samples=lambda: 1 + rank) as local:
        train(model, optimizer, rank, range(30))
        assert equal_on_all(values(model))
        assert "gradients travel in auto, beside the backward pass" in local.explain()
        assert "bf16" in local.explain()


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_averages_begin_before_the_backward_pass_has_ended(rank: int, size: int) -> None:
    """The order of events, and not of times."""
    events: list[str] = []
    plain = Bucket.start

    def start(self: Bucket, *given: Any, **named: Any) -> None:
        events.append(f"bucket {given[1]}")
        plain(self, *given, **named)

    model: Any = nn.Sequential(*(nn.Linear(60, 60) for _ in range(4)))
    optimizer = sgd(model)
    model[0].weight.register_hook(lambda _: events.append("first layer"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "BYTES", 14_000)
        patch.setattr(Bucket, "start", start)
        with exact(model, optimizer):
            for _ in range(3):
                events.clear()
                optimizer.zero_grad()
                model(torch.ones(1, 60)).sum().backward()
                events.append("backward ended")
                assert equal_on_all(model[0].weight.grad)
                optimizer.step()
    assert events == ["bucket 0", "bucket 1", "bucket 2", "first layer", "bucket 3", "backward ended"]


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_grad_scaler_skips_a_step_on_all_ranks(rank: int, size: int) -> None:
    for fused, keeps in itertools.product((False, True), repeat=2):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        made = []
        with exact(model, optimizer) as local:
            for step in range(6):
                optimizer.zero_grad(set_to_none=not keeps)
                value = loss_of(model, rank, step) * (torch.inf if (rank, step) in ((1, 2), (0, 4)) else 1)
                before = values(model)
                scaler.scale(value).backward()
                scaler.step(optimizer)
                scaler.update()
                made.append(not torch.equal(values(model), before))
                assert equal_on_all(values(model))
            assert averages_of(local) == 6
        assert made == [True, True, False, True, False, True]


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_gradients_that_no_backward_pass_has_made(rank: int, size: int) -> None:
    """As of torch.autograd.grad; and a rank that makes none at all."""
    model = Net()
    optimizer = sgd(model)
    with exact(model, optimizer):
        train(model, optimizer, rank, range(2))
        optimizer.zero_grad()
        if rank == 0:
            parameters = list(model.parameters())
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss_of(model, 0, 2), parameters), strict=True
            ):
                parameter.grad = gradient
        optimizer.step()
        assert equal_on_all(values(model))
        train(model, optimizer, rank, range(3, 5))
    assert equal_on_all(values(model))


class Checkpointed(nn.Module):
    """Two layers share weights, and nested backward passes accumulate their gradients one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.layers[2].weight = self.layers[1].weight
        self.end = nn.Linear(40, 7)

    def forward(self, given: Tensor) -> Tensor:
        given = given.requires_grad_()
        for layer in self.layers:
            given = checkpoint(layer, given, use_reentrant=True)
        return self.end(given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["compiled", "checkpointed"])
@ranks.on(2, ranks.run_job, environ=EXACT)
def test_compiled_models_and_nested_backward_passes(rank: int, size: int, kind: str) -> None:
    model, other = (Net(), Net()) if kind == "compiled" else (Checkpointed(), Checkpointed())
    run: Any = torch.compile(model, backend="eager") if kind == "compiled" else model
    optimizers = sgd(run), sgd(other)
    with pytest.MonkeyPatch.context() as patch, exact(run, optimizers[0]) as local:
        patch.setattr(bucket, "BYTES", BYTES)
        train(run, optimizers[0], rank, range(5))
        assert averages_of(local) == 5
    for step in range(5):
        optimizers[1].zero_grad()
        loss_of(other, rank, step).backward()
        for parameter in other.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizers[1].step()
    assert torch.equal(values(model), values(other))


@pytest.mark.parametrize("codec", ["int4", "powersgd:4"])
@ranks.on(SIZE, ranks.run_job, environ=EXACT)
def test_a_restored_training_has_the_bits_of_one_that_went_on(rank: int, size: int, codec: str) -> None:
    policy = commlayer.Policy(codec=codec, exact_steps=2, deterministic=True)

    def begin() -> tuple[Any, Any, Any]:
        model = Net()
        optimizer = sgd(model)
        return model, optimizer, exact(model, optimizer, policy=policy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "BYTES", BYTES)
        model, optimizer, local = begin()
        saved = []
        with local:
            for step in range(12):
                saved.append(copied((model.state_dict(), optimizer.state_dict(), local.state_dict())))
                train(model, optimizer, rank, [step])
        expected = values(model)
        for step in (0, 1, 5, 8):
            parts = begin()
            for part, state in zip(parts, saved[step], strict=True):
                part.load_state_dict(state)
            model, optimizer, local = parts
            with local:
                train(model, optimizer, rank, range(step, 12))
            assert torch.equal(values(model), expected), step


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_sites_of_two_ranks_average_in_a_codec(rank: int, size: int) -> None:
    site = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for codec in ("int8", "int4"):
        model, other = DistributedDataParallel(Net(WIDE), process_group=site), DistributedDataParallel(Net(WIDE))
        optimizers = sgd(model), sgd(other)
        with exact(model, optimizers[0], group=between, policy=commlayer.Policy(codec=codec)) as local:
            train(model, optimizers[0], rank, range(8))
            train(other, optimizers[1], rank, range(8))
            assert equal_on_all(values(model))
            change = values(other) - values(Net(WIDE))
            assert 1e-4 < (values(model) - values(other)).norm() / change.norm() < 0.15
            assert f"gradients travel in {codec}, in optimizer.step()" in local.explain()
    with pytest.raises(commlayer.ConfigError, match="needs whole buckets"):
        exact(model, optimizers[0], group=between, policy=commlayer.Policy(codec="auto")).__enter__()
    dist.barrier()


def of_settings(rank: int, size: int) -> str:
    with ranks.job(rank, size):
        model = Net()
        optimizer = sgd(model)
        with exact(model, optimizer) as local:
            train(model, optimizer, rank, range(3))
            assert equal_on_all(values(model))
            return local.explain()


def test_the_policy_of_the_job_counts() -> None:
    environ = {**ranks.NETWORK, "COMMLAYER_POLICY_CODEC": "int8"}
    assert "gradients travel in int8" in ranks.run(of_settings, 2, environ=environ)[0]


def trained(rank: int, codec: str, lab: FakeGpu | None) -> Tensor:
    """The weights after some exact steps, whose buckets are on a device if there is a lab."""
    plain, wait = Bucket.fill, Started.wait

    def fill(self: Bucket, *, on_host: bool = False) -> None:
        assert lab is not None
        lab.cuda.adopt(self._memory)
        plain(self, on_host=on_host)

    def ordered(self: Started) -> None:
        assert lab is not None
        wait(self)
        lab.order()  # kernels of a model run at once

    model = Net()
    optimizer = sgd(model)
    policy = commlayer.Policy(codec=codec, deterministic=True)
    with pytest.MonkeyPatch.context() as patch, exact(model, optimizer, policy=policy) as local:
        patch.setattr(bucket, "BYTES", BYTES)
        if lab is not None:
            assert local._training.exact is not None
            lab.stage(local._training.exact._group)
            patch.setattr(Bucket, "fill", fill)
            patch.setattr(Started, "wait", ordered)
        train(model, optimizer, rank, range(6))
        assert equal_on_all(values(model))
        assert local._training.exact is not None
        assert bool(local._training.exact.state.in_flight._steps) == (lab is not None)
    return values(model)


@pytest.mark.parametrize("codec", ["none", "int4"])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_buckets_on_a_device(rank: int, size: int, codec: str) -> None:
    assert torch.equal(trained(rank, codec, FakeGpu()), trained(rank, codec, None))
