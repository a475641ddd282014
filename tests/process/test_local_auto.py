"""Exact steps of `LocalSteps`, and `every="auto"`, which measures and then decides on all ranks alike."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.local import exact, pace
from commlayer.frontend.local.bucket import Bucket
from commlayer.frontend.local.exact import ExactSteps
from commlayer.frontend.local.measured import Measured
from commlayer.frontend.local.sync import Outcome, Sync
from commlayer.frontend.local.turns import Turns
from tests import ranks
from tests.process.test_local_state import copied, values
from tests.process.test_local_steps import Net, equal_on_all, loss_of, train

STEPS = 14


def pretend(patch: pytest.MonkeyPatch, step_s: float, rate: float, latency_s: float = 0.0) -> None:
    """Lets `auto` find this step, and this rate and latency of the link."""

    def measured(self: ExactSteps, value_bytes: float, fragments: int) -> Measured:
        found = original(self, value_bytes, fragments)
        return found._replace(step_s=step_s, rate=rate, latency_s=latency_s)

    original = ExactSteps.measured
    patch.setattr(ExactSteps, "measured", measured)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("samples", [False, True])
@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_exact_steps_are_those_of_ddp(rank: int, size: int, samples: bool) -> None:
    model, other = Net(), DistributedDataParallel(Net())
    weights = (1.0, 3.0, 2.0)
    count = (lambda: weights[rank]) if samples else None
    state = commlayer.HookState(samples=count)
    other.register_comm_hook(state, commlayer.allreduce_hook)
    optimizers = adam(model), adam(other)
    with commlayer.LocalSteps(model, optimizers[0], 4, 2, samples=count, exact_steps=100) as local:
        train(model, optimizers[0], rank, range(STEPS))
        assert (local.steps, local.syncs) == (STEPS, 0)
        assert equal_on_all(values(model))
        with local.averaged():
            assert equal_on_all(values(model))
    train(other, optimizers[1], rank, range(STEPS))
    assert torch.allclose(values(model), values(other), rtol=1e-4, atol=1e-5)
    assert equal_on_all(values(model))


@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_unused_parameters_keep_no_gradient_where_no_rank_has_one(rank: int, size: int) -> None:
    model: Any = Net()
    model.unused, model.sometimes = nn.Linear(3, 3), nn.Linear(7, 7)
    optimizer = adam(model)
    with commlayer.LocalSteps(model, optimizer, 4, 2, exact_steps=100):
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            if rank == 1:
                loss = loss + model.sometimes.weight.square().sum()
            loss.backward()
            optimizer.step()
            assert model.unused.weight.grad is None
            assert equal_on_all(model.sometimes.weight.grad)
    assert equal_on_all(values(model))


@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_local_steps_follow_exact_ones(rank: int, size: int) -> None:
    model = Net()
    optimizer = adam(model)
    with commlayer.LocalSteps(model, optimizer, 4, 2, exact_steps=5) as local:
        train(model, optimizer, rank, range(5))
        assert equal_on_all(values(model))
        if rank == 1:  # as a CPU that rounds differently
            next(model.parameters()).detach()[0, 0] += 1e-6
        train(model, optimizer, rank, range(5, 9))
        assert not equal_on_all(values(model))
        assert (local.steps, local.syncs) == (9, 2)
        assert "5 exact steps, 4 local steps and 2 syncs so far" in local.explain()
    assert equal_on_all(values(model))


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_exact_steps_of_sites_of_two_ranks(rank: int, size: int) -> None:
    site = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model, other = DistributedDataParallel(Net(), process_group=site), DistributedDataParallel(Net())
    optimizers = adam(model), adam(other)
    with commlayer.LocalSteps(model, optimizers[0], 4, 2, group=between, exact_steps=8):
        train(model, optimizers[0], rank, range(7))
        assert equal_on_all(values(model))
        train(other, optimizers[1], rank, range(7))
        assert torch.allclose(values(model), values(other), rtol=1e-4, atol=1e-5)
        train(model, optimizers[0], rank, range(7, 15))
    assert equal_on_all(values(model))


def restored(saved: Any) -> tuple[Net, torch.optim.Optimizer, commlayer.LocalSteps]:
    """All that trains, from its states."""
    model = Net()
    optimizer = adam(model)
    local = commlayer.LocalSteps(model, optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    local.load_state_dict(saved[2])
    return model, optimizer, local


def decide(rank: int, size: int, step_s: float, rate: float, restores: bool) -> tuple[str, int, str]:
    with pytest.MonkeyPatch.context() as patch, ranks.job(rank, size):
        pretend(patch, step_s, rate)
        model = Net()
        optimizer = adam(model)
        with commlayer.LocalSteps(model, optimizer) as local:
            train(model, optimizer, rank, range(exact.MEASURED))
            explained = local.explain()
            train(model, optimizer, rank, range(exact.MEASURED, 20))
            saved = copied((model.state_dict(), optimizer.state_dict(), local.state_dict()))
            syncs = local.syncs
        if restores:
            model, optimizer, local = restored(saved)
            with local:
                assert (local.steps, local.syncs) == (20, syncs)
                train(model, optimizer, rank, range(20, 26))
        assert equal_on_all(values(model))
        return explained, syncs, str(local._training.given.every)


def test_auto_stays_exact_on_a_fast_link_and_says_so() -> None:
    for explained, syncs, _ in ranks.run(decide, 3, 1.0, 1e9, False, environ=ranks.NETWORK):
        assert "H* = 1" in explained
        assert " bytes each between " in explained
        assert "all stay exact, since H* is 1. An average in float32 takes " in explained
        assert syncs == 0


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_steps_that_stay_exact_take_the_codec_of_the_policy(rank: int, size: int) -> None:
    model = Net()
    optimizer = adam(model)
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, 1.0, 1e9)
        with commlayer.LocalSteps(model, optimizer, policy=commlayer.Policy(codec="int8")) as local:
            train(model, optimizer, rank, range(exact.MEASURED - 1))
            assert "gradients travel in float32, after the backward pass" in local.explain()
            train(model, optimizer, rank, [exact.MEASURED - 1])
            assert "gradients travel in int8, beside the backward pass; all stay exact" in local.explain()
            train(model, optimizer, rank, range(exact.MEASURED, 12))
            assert equal_on_all(values(model))
            assert local.syncs == 0


@pytest.mark.parametrize(("least", "every"), [(2, 8), (12, 12)])
def test_auto_takes_the_least_number_of_steps_that_hides_the_network_from_eight_on(least: int, every: int) -> None:
    # 14407 values of 0.77 bytes, 4/3 of them per sync: least - 0.5 steps.
    size = sum(parameter.numel() for parameter in Net().parameters())
    bytes_sent = 4 / 3 * size * (130 / 256 + 66 / 64) / 2
    found = ranks.run(decide, 3, 0.01, bytes_sent / (0.01 * (least - 0.5)), True, environ=ranks.NETWORK)
    assert len(set(found)) == 1  # all ranks agree
    explained, syncs, _ = found[0]
    assert f"H* = {least}" in explained
    assert f"in 4 fragments, each sent every {every} steps" in explained
    assert syncs == (20 - exact.MEASURED) * 4 // every


def unequal(rank: int, size: int) -> str:
    with ranks.job(rank, size):
        model = Net()
        optimizer = adam(model)
        with pytest.raises(commlayer.CommError) as error, commlayer.LocalSteps(model, optimizer, exact_steps=100):
            train(model, optimizer, rank, range(3 if rank else 4))
        return str(error.value)


def test_a_rank_that_leaves_exact_steps_early_is_named_on_all() -> None:
    for text in ranks.run(unequal, 2, environ=ranks.NETWORK):
        assert "rank 1 has ended `with LocalSteps(...)`, and others make another exact step" in text


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_measured_times_are_those_of_all_ranks(rank: int, size: int) -> None:
    model = Net()
    optimizer = adam(model)
    with commlayer.LocalSteps(model, optimizer, exact_steps=8) as local:
        train(model, optimizer, rank, range(8))
        assert local._measured is not None
        told: list[Any] = [None] * size
        dist.all_gather_object(told, local._measured)
        assert told[0] == told[1]
        assert told[0].step_s > 0
        assert told[0].rate > 0
        assert told[0].latency_s >= 0


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_the_latency_of_the_link_makes_syncs_rarer(rank: int, size: int) -> None:
    model = Net()
    optimizer = adam(model)
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, 0.1, 1e9, 0.24)
        with commlayer.LocalSteps(model, optimizer) as local:
            train(model, optimizer, rank, range(exact.MEASURED + 1))
            assert "240 ms of latency" in local.explain()
            assert "in 4 fragments, each sent every 12 steps" in local.explain()


@contextlib.contextmanager
def slow_syncs(rank: int, seconds: float) -> Iterator[None]:
    """A context in which syncs end so late, on rank 1 somewhat later."""
    finish = Sync.finish

    def finish_late(self: Sync) -> Outcome:
        time.sleep(seconds * (1 + rank))
        return finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "WINDOW", 4)
        patch.setattr(Sync, "finish", finish_late)
        yield


def turns_of(local: commlayer.LocalSteps) -> Turns:
    assert local._training.rounds is not None
    return local._training.rounds.turns


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_h_follows_the_times_of_syncs_also_after_a_restore(rank: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, 0.1, 1e9, 0.1)
        model = Net()
        optimizer = adam(model)
        with slow_syncs(rank, 0.1), commlayer.LocalSteps(model, optimizer) as local:
            train(model, optimizer, rank, range(exact.MEASURED + 7))
            assert "each sent every 8 steps" in local.explain()
            assert "followed" not in local.explain()
            train(model, optimizer, rank, range(40))
            told: list[Any] = [None] * size
            dist.all_gather_object(told, (local.explain(), turns_of(local)))
            assert told[0] == told[1]
            turns = told[0][1]
            assert turns.every > 8
            assert f", {turns.every} from sync {turns.since_turn} on" in local.explain()
            saved = copied((model.state_dict(), optimizer.state_dict(), local.state_dict()))
        model, optimizer, local = restored(saved)
        with local:
            assert turns_of(local) == turns
            train(model, optimizer, rank, range(3 * turns.every))
            assert equal_on_all(torch.tensor([local.syncs]))
        assert equal_on_all(values(model))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_given_h_stays_where_syncs_are_slow(rank: int, size: int) -> None:
    model = Net()
    optimizer = adam(model)
    with slow_syncs(rank, 0.02), commlayer.LocalSteps(model, optimizer, 4) as local:
        train(model, optimizer, rank, range(30))
        assert "each sent every 4 steps" in local.explain()


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_short_averages_have_the_bytes_of_a_sync_and_change_nothing(rank: int, size: int) -> None:
    model, other = Net(), Net()
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        original = ExactSteps._try

        def attempt(self: ExactSteps) -> None:
            original(self)
            assert self._part is not None
            counts.append(len(self._part))
            assert not self._part.any()

        patch.setattr(ExactSteps, "_try", attempt)
        for each, every in ((model, "auto"), (other, 4)):
            optimizer = adam(each)
            exact_steps = exact.MEASURED + 2
            with commlayer.LocalSteps(each, optimizer, every, fragments=2, exact_steps=exact_steps) as local:
                train(each, optimizer, rank, range(exact.MEASURED))
                assert local.syncs == 0
                if each is model:
                    met = values(model)
        assert torch.equal(met, values(other))
    size = sum(parameter.numel() for parameter in Net().parameters())
    bytes_of_sync = size / 2 * 130 / 256  # two sites send contributions only
    assert counts == [math.ceil(bytes_of_sync / 4)] * exact.MEASURED


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"delay": 2}, r"every='auto', delay=2\): leave delay out"),
        ({"exact_steps": -1}, r"exact_steps=-1\): use a whole number"),
        ({"every": "often"}, r"every='often'\): use a whole number"),
        ({"fragments": 0}, r"fragments=0\): use a whole number"),
    ],
)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_arguments_out_of_range(rank: int, size: int, arguments: dict[str, Any], text: str) -> None:
    model = Net()
    with pytest.raises(commlayer.ConfigError, match=text), commlayer.LocalSteps(model, adam(model), **arguments):
        pass


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_no_count_of_samples_in_an_exact_step(rank: int, size: int) -> None:
    model = Net()
    local = commlayer.LocalSteps(model, adam(model), samples=lambda: -1 if rank else 3)
    with pytest.raises(commlayer.ConfigError, match=r"of rank 1 returned no count"), local:
        train(model, local._optimizer, rank, range(2))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_no_samples_count_nothing_in_an_exact_step(rank: int, size: int) -> None:
    """The mean of no samples is NaN."""
    model, alone = Net(), Net()
    optimizers = adam(model), adam(alone)
    samples = 3
    with commlayer.LocalSteps(model, optimizers[0], 4, 2, samples=lambda: samples, exact_steps=100):
        for step in range(4):
            samples = 0 if rank == 1 else 3
            for net, optimizer, other in zip((model, alone), optimizers, (rank, 0), strict=True):
                optimizer.zero_grad()
                (loss_of(net, other, step) * (torch.nan if other else 1)).backward()
                optimizer.step()
    assert torch.allclose(values(model), values(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unscales", [False, True])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_fused_optimizers_with_a_grad_scaler_are_refused_where_steps_average(
    rank: int, size: int, unscales: bool
) -> None:
    model = DistributedDataParallel(Net(), process_group=[dist.new_group([each]) for each in range(size)][rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0 if rank else 1024.0)

    def step() -> None:
        scaler.scale(loss_of(model, rank, 0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        dist.barrier()
        scaler.step(optimizer)

    name = "found_inf" if unscales else "grad_scale"
    with (
        pytest.raises(commlayer.ConfigError, match=rf"SGD\.{name} is set: .* without fused=True"),
        commlayer.LocalSteps(model, optimizer, 4, 2, exact_steps=100),
    ):
        step()
    dist.barrier()


class Clock:
    """Seconds that pass only where a bucket takes its gradients."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_step_ends_when_its_gradients_are_on_the_host(rank: int, size: int) -> None:
    """On a GPU the backward pass runs until the copies of the gradients to the host have waited for it."""
    clock, plain = Clock(), Bucket.fill

    def slow(self: Bucket, *, on_host: bool = False) -> None:
        assert on_host
        clock.now_s += 1.0
        plain(self, on_host=on_host)

    model = Net()
    optimizer = adam(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "time", clock)
        patch.setattr(Bucket, "fill", slow)
        with commlayer.LocalSteps(model, optimizer, exact_steps=100) as local:
            train(model, optimizer, rank, range(3))
            assert local._training.exact is not None
            assert local._training.exact._step_s == [1.0] * 2


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_exact_steps_end_with_the_weights_of_the_first_site(rank: int, size: int) -> None:
    model = Net()
    optimizer = adam(model)
    with commlayer.LocalSteps(model, optimizer, 4, 2, exact_steps=100):
        train(model, optimizer, rank, range(3))
        before = values(model)
        if rank == 1:  # as a CPU that rounds differently
            next(model.parameters()).detach()[0, 0] += 1e-6
    assert equal_on_all(values(model))
    assert torch.equal(values(model), before)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_numbers_of_fragments_that_differ_are_refused_before_auto_decides(rank: int, size: int) -> None:
    model = Net()
    with (
        pytest.raises(commlayer.ConfigError, match="fragments differs: 4 on rank 0, 2 on rank 1"),
        commlayer.LocalSteps(model, adam(model), fragments=2 if rank else 4),
    ):
        pass
