"""Pipelines whose gradients travel while other stages compute: training is bit by bit that with a plain reduction."""

import os
import time
from typing import Any

import pytest
import torch
from torch import nn

import commlayer
from commlayer.scheduler.deferred import DeferredStep
from tests import ranks
from tests.fake_transport import on_fake
from tests.pipelines import (
    LOOPS,
    MICROBATCHES,
    MODES,
    OPTIMIZERS,
    WIDTH,
    Block,
    Loop,
    Training,
    clip,
    clipping,
    compare,
    compare_late,
    compiled_in_place,
    eager,
    runnable,
    scaling,
    usual,
)

LAYERS = 2 * (2 * WIDTH) * WIDTH + 3 * WIDTH
"""Elements of a block's layers."""


@pytest.mark.parametrize(
    "schedules",
    [
        ("GPipe", "1F1B"),
        ("Interleaved1F1B", "LoopedBFS", MICROBATCHES),
        ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
    ],
    ids=str,
)
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_losses_and_parameters_are_those_of_a_plain_reduction(rank: int, size: int, schedules: Any) -> None:
    for schedule in runnable(schedules):
        compare(rank, usual, schedule)


@ranks.on(4, ranks.run_job)
def test_optimizers(rank: int, size: int) -> None:
    for make in OPTIMIZERS.values():
        compare(rank, usual, "LoopedBFS", make)


@pytest.mark.parametrize("part", range(4))
@ranks.on(4, ranks.run_job)
def test_loops(rank: int, size: int, part: int) -> None:
    for loop in LOOPS[part::4]:
        compare(rank, loop, "Interleaved1F1B", OPTIMIZERS["SGD"])
        compare(rank, loop, "1F1B", OPTIMIZERS["SGD"], [{"by_next_use": False}])


@pytest.mark.parametrize(
    "policies",
    [
        (commlayer.Policy(codec="int8"), commlayer.Policy(codec="int4")),
        (commlayer.Policy(codec="topk:0.1", exact_steps=1), commlayer.Policy(loss_bound=0.1, algorithm="direct")),
    ],
    ids=["quantized", "selected, lossy"],
)
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_codecs_and_residuals(rank: int, size: int, policies: tuple[commlayer.Policy, ...]) -> None:
    """Nothing is lost on loopback, so deferred steps have the results of the others."""
    for policy in policies:
        seen = []
        for mode in MODES:
            training = Training(rank, "LoopedBFS", OPTIMIZERS["SGD"], policy=policy, **mode)
            usual(training)
            training.see_parameters()
            assert training.handle is not None
            assert training.handle.state.averaged_bytes > 0
            seen.append(training.seen)
        assert all(map(torch.equal, *seen)), policy


def clipping_at_times(training: Training) -> None:
    for step in range(training.steps):
        training.run(step)
        if step % 2 == 0:
            clip(training)
        training.optimizer.step()
        training.optimizer.zero_grad()


@pytest.mark.parametrize("loop", [usual, clipping, clipping_at_times, scaling])
@ranks.on(4, ranks.run_job)
def test_staleness_one_is_the_rule_of_its_name(rank: int, size: int, loop: Loop) -> None:
    compare_late(rank, loop, "LoopedBFS")


@ranks.on(4, ranks.run_job)
def test_a_grad_scaler_and_a_fused_optimizer(rank: int, size: int) -> None:
    """Such an optimizer is called after an overflow, too, and skips the step by itself."""
    compare(rank, scaling, "LoopedBFS", OPTIMIZERS["Adam, fused"])
    with pytest.raises(commlayer.ConfigError, match=r"staleness=1\) with Adam and a GradScaler: .* use fused=False"):
        scaling(Training(rank, "LoopedBFS", OPTIMIZERS["Adam, fused"], staleness=1))


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_residuals_under_a_grad_scaler(rank: int, size: int) -> None:
    """The overflow of one replica is that of all, and leaves the residuals as they were."""
    seen = []
    for mode in MODES:
        training = Training(rank, "LoopedBFS", OPTIMIZERS["SGD"], policy=commlayer.Policy(codec="int4"), **mode)
        scaling(training)
        training.see_parameters()
        assert all(bool(parameter.isfinite().all()) for parameter in training.blocks.parameters())
        seen.append(training.seen)
    assert all(map(torch.equal, *seen))


@ranks.on(4, ranks.run_job)
def test_a_state_of_the_caller_averages_over_the_replicas(rank: int, size: int) -> None:
    compare(rank, usual, "LoopedBFS", modes=[{"state": commlayer.HookState()}])


@ranks.on(4, ranks.run_job)
def test_an_optimizer_for_each_stage(rank: int, size: int) -> None:
    seen = []
    for attaches in (False, True):
        training = Training(rank, "LoopedBFS", attached=False)
        optimizers = [OPTIMIZERS["AdamW"](block.parameters()) for block in training.blocks]
        if attaches:
            training.handle = commlayer.pipeline.attach(training.schedule, optimizers, training.dp)
        for step in range(3):
            training.run(step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        training.see_parameters()
        seen.append(training.seen)
    assert all(map(torch.equal, *seen))


MODULES = pytest.mark.parametrize("compiled", [eager, compiled_in_place])


@MODULES
@ranks.on(4, on_fake)
def test_steps_are_made_before_the_next_forward_in_classes_by_next_use(rank: int, size: int, compiled: Any) -> None:
    training = Training(rank, "LoopedBFS", compiled=compiled)
    assert training.handle is not None
    native: Any = training.handle.state.group()._native
    messages: Any = training.pp
    steps: Any = training.handle._steps[0]
    left = training.watch()
    for step in range(2):
        left.clear()
        native.operations.clear()
        native.orders.clear()
        messages._native.operations.clear()
        training.run(step)
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert len(steps._claims) == 2 * 5  # two layers and the gain of each block
    first, second = training.numbers
    assert left == [(first, 2)] * MICROBATCHES + [(second, 0)] * MICROBATCHES
    reduced = [(call.numel, class_) for call, _, class_ in native.operations if call.collective == "all_reduce"]
    assert reduced == [(WIDTH, 7), (LAYERS, 7), (WIDTH, 1), (LAYERS, 1)]  # those of the back stage first
    assert native.orders == [2, 2, 1, 1]
    assert {class_ for call, _, class_ in messages._native.operations if call.collective == "send"} == {0}
    training.handle.finish()


@ranks.on(4, on_fake)
def test_with_staleness_one_gradients_travel_first_in_first_out(rank: int, size: int) -> None:
    """Strict classes would keep the last stage's gradients behind the next step's, which are needed later."""
    training = Training(rank, "LoopedBFS", staleness=1)
    assert training.handle is not None
    native: Any = training.handle.state.group()._native
    for step in range(2):
        native.operations.clear()  # the first step compares the ranks' gradients
        training.run(step)
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert {class_ for call, _, class_ in native.operations if call.collective == "all_reduce"} == {4}
    assert set(native.orders) == {0}
    training.handle.finish()


@MODULES
@ranks.on(4, on_fake)
def test_the_last_backward_of_1f1b_starts_reductions(rank: int, size: int, compiled: Any) -> None:
    training = Training(rank, "1F1B", compiled=compiled)
    assert training.handle is not None
    native: Any = training.handle.state.group()._native
    stage = training.schedule._stage
    started: list[int] = []
    backward = stage.backward_one_chunk

    def watched(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        started.append(len(native.operations))

    stage.backward_one_chunk = watched
    for step in range(4):
        started.clear()
        native.operations.clear()
        training.run(step)
        training.optimizer.step()
        training.optimizer.zero_grad()
        assert started == [0] * (MICROBATCHES - 1) + [2 if step > 1 else 0]  # known from the step before
        assert len(native.operations) == (2 if step else 3)  # in the first step, the ranks also agree
    training.handle.finish()


def _lose_a_peer(rank: int, size: int) -> tuple[str, float]:
    ranks.init(rank, size)
    training = Training(rank, "LoopedBFS", OPTIMIZERS["SGD"])
    for step in range(3):
        training.run(step)
        if step == 2 and rank == 3:
            os._exit(1)
        training.optimizer.step()
    start = time.monotonic()
    with pytest.raises(commlayer.CommError) as lost:
        _go_on(training)
    return f"{type(lost.value).__name__}: {lost.value}", time.monotonic() - start


def _go_on(training: Training) -> None:
    for step in range(3, 5):
        training.run(step)
        training.optimizer.step()
    training.see_parameters()


def test_a_peer_that_dies_is_an_error_of_its_type_on_every_rank() -> None:
    environ = {"COMMLAYER_SHM": "0", "COMMLAYER_PEER_TIMEOUT_S": "1"}
    *others, last = ranks.outcomes(_lose_a_peer, 4, environ=environ)
    assert last.exit_code == 1
    for rank, outcome in enumerate(others):
        assert outcome.error is None, (rank, outcome.error)
        assert outcome.result[1] < 20
    assert "PeerLostError" in others[1].result[0]


def refused(text: str, schedule: Any, optimizer: Any, group: Any, **options: Any) -> None:
    with pytest.raises(commlayer.ConfigError, match=text):
        commlayer.pipeline.attach(schedule, optimizer, group, **options)


@ranks.on(4, on_fake)
def test_refusals(rank: int, size: int) -> None:
    training = Training(rank, "LoopedBFS", attached=False)
    schedule, optimizer, dp = training.schedule, training.optimizer, training.dp
    for staleness in (2, True):
        refused(rf"staleness={staleness}\): use 0", schedule, optimizer, dp, staleness=staleness)
    refused("defer=False, staleness=1", schedule, optimizer, dp, defer=False, staleness=1)
    refused("attach with LBFGS", schedule, torch.optim.LBFGS(training.blocks.parameters()), dp)
    refused("optimizer='Adam'", schedule, "Adam", dp)
    refused("dp_group=None", schedule, optimizer, None)
    refused("Linear is no schedule of torch.distributed.pipelining", nn.Linear(2, 2), optimizer, dp)
    for codec in ("int4", "auto", "powersgd:4"):
        refused(r"attach\(staleness=1", schedule, optimizer, dp, policy=commlayer.Policy(codec=codec), staleness=1)
    refused("staleness=1", schedule, optimizer, dp, policy=commlayer.Policy(loss_bound=0.1), staleness=1)
    refused("codec='sign'", schedule, optimizer, dp, policy=commlayer.Policy(codec="sign"))
    refused("give one of both", schedule, optimizer, dp, policy=commlayer.Policy(), state=commlayer.HookState())
    refused("its process_group has ranks", schedule, optimizer, dp, state=commlayer.HookState(None, training.pp))
    several = [torch.optim.SGD([parameter], lr=0.1) for parameter in training.blocks.parameters()]
    refused("optimizers have parameters of stage", schedule, several, dp)
    refused("has a custom function for REDUCE_GRAD", _with_custom_function(rank), optimizer, dp)
    first, second = training.blocks
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    own, second.inner.weight = second.inner.weight, first.inner.weight
    refused("share parameter 'inner.weight'", schedule, optimizer, dp)
    second.inner.weight = own
    first.embedding = nn.Embedding(2, 2, sparse=True)
    refused("'embedding' has sparse gradients", schedule, optimizer, dp)
    del first.embedding
    stage = schedule._stages[0]
    stage.submod = nn.parallel.DistributedDataParallel(first, process_group=dp)
    refused("is a DistributedDataParallel", schedule, optimizer, dp)
    stage.submod = first
    handle = commlayer.pipeline.attach(schedule, optimizer, dp)
    refused("after another attach", schedule, torch.optim.SGD(training.blocks.parameters(), lr=0.1), dp)
    handle.remove()
    commlayer.pipeline.attach(schedule, optimizer, dp, defer=False).remove()
    several = [torch.optim.SGD(block.parameters(), lr=0.1) for block in training.blocks]
    taken = DeferredStep(several[1])
    refused("it has an overlap already", schedule, several, dp)
    taken.remove()
    commlayer.pipeline.attach(schedule, tuple(several), dp).remove()
    with pytest.raises(commlayer.ConfigError, match=r"rank \d of 2 has the stages .*; give it the stages"):
        commlayer.pipeline.schedule(schedule._stages[::-1], MICROBATCHES)
    with pytest.raises(commlayer.ConfigError, match="group=5 does not fit"):
        commlayer.pipeline.schedule(schedule._stages, MICROBATCHES, 5)


def _with_custom_function(rank: int) -> Any:
    from torch.distributed.pipelining.schedules import REDUCE_GRAD

    schedule = Training(rank, "LoopedBFS", attached=False).schedule
    schedule.register_custom_function(REDUCE_GRAD, lambda *_: None)
    return schedule


@ranks.on(4, ranks.run_job)
def test_a_gradient_that_the_first_step_did_not_have_is_an_error(rank: int, size: int) -> None:
    late = Training(rank, "GPipe")
    assert late.handle is not None
    late.run(0)
    late.optimizer.step()
    late.handle.finish()
    block: Any = late.blocks[0]
    block.unused.grad = torch.ones(3)
    thawed = Training(rank, "GPipe", attached=False)
    for parameter in thawed.blocks.parameters():
        parameter.requires_grad_(False)
    commlayer.pipeline.attach(thawed.schedule, thawed.optimizer, thawed.dp)
    for parameter in thawed.blocks.parameters():
        parameter.requires_grad_(True)
    for training, name in ((late, "unused"), (thawed, "gain")):
        with pytest.raises(commlayer.ConfigError, match=f"{name!r} of stage {training.place} has a gradient"):
            training.run(1)
