"""Pipelines of FSDP2 stages: training is bit by bit that of torch's own reduction."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commlayer
from commlayer.frontend.overlap.fsdp import groups_of
from tests import ranks
from tests.fake_transport import on_fake
from tests.pipelines import (
    MICROBATCHES,
    Block,
    Loop,
    Training,
    accumulating,
    clipping,
    compare,
    compare_late,
    evaluating,
    mesh,
    never_zeroing,
    restoring,
    runnable,
    scaling,
    usual,
)


@pytest.mark.parametrize(
    "schedules",
    [("GPipe", "1F1B", "LoopedBFS"), ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")],
    ids=str,
)
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_losses_and_parameters_are_those_of_torch(rank: int, size: int, schedules: Any) -> None:
    for schedule in runnable(schedules):
        compare(rank, usual, schedule, sharded=True)


@pytest.mark.parametrize(
    "loops",
    [(accumulating, clipping), (evaluating, scaling), (never_zeroing, restoring)],
    ids=lambda loops: " and ".join(loop.__name__ for loop in loops),
)
@ranks.on(4, ranks.run_job)
def test_loops(rank: int, size: int, loops: tuple[Loop, ...]) -> None:
    for loop in loops:
        compare(rank, loop, "LoopedBFS", sharded=True)


@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS"])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_staleness_one_is_the_rule_of_its_name(rank: int, size: int, schedule: str) -> None:
    for loop in (usual, clipping, scaling):
        compare_late(rank, loop, schedule, steps=4, sharded=True)


def half(block: Block) -> None:
    fully_shard(
        block,
        mesh=mesh()["dp"],
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    )


@ranks.on(4, ranks.run_job)
def test_gradients_that_fsdp_reads_at_once(rank: int, size: int) -> None:
    compare(rank, usual, "LoopedBFS", shard=half)


@ranks.on(4, on_fake)
def test_weights_are_gathered_after_their_steps(rank: int, size: int) -> None:
    training = Training(rank, "LoopedBFS", sharded=True)
    assert training.handle is not None
    native: Any = training.dp
    left = training.watch()
    for step in range(2):
        left.clear()
        native._native.operations.clear()
        training.run(step)
        training.optimizer.step()
        training.optimizer.zero_grad()
    first, second = training.numbers
    before = [(first, 3)] * (MICROBATCHES // 2) + [(first, 0)] * (MICROBATCHES // 2)  # two layers and the block
    assert left == before + [(second, 0)] * MICROBATCHES
    found = [(call.collective, class_) for call, _, class_ in native._native.operations]
    assert [call for call in found if call[0] == "reduce_scatter"] == [("reduce_scatter", 7)] * 3 + [
        ("reduce_scatter", 1)
    ] * 3
    assert [call for call in found if call[0] == "all_gather"] == [("all_gather", 0)] * 6
    training.handle.finish()


def _replicate(block: Block) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(block, mesh=mesh()["dp"])


@ranks.on(4, on_fake)
def test_refusals(rank: int, size: int) -> None:
    def refused(text: str, training: Training, group: Any = None, **options: Any) -> None:
        with pytest.raises(commlayer.ConfigError, match=text):
            commlayer.pipeline.attach(training.schedule, training.optimizer, group or training.dp, **options)

    training = Training(rank, "LoopedBFS", attached=False, sharded=True)
    refused("no place for the state", training, policy=commlayer.Policy(codec="int4"))
    refused("FSDP2 has no place for its residuals", training, state=commlayer.HookState())
    refused("is sharded over ranks .*, and dp_group has", training, training.pp)
    replicated = Training(rank, "LoopedBFS", attached=False, shard=_replicate)
    refused("is given to replicate", replicated)
    refused("is sharded over ranks .*, and dp_group has", training, dist.group.WORLD)
    within = Training(rank, "LoopedBFS", attached=False, shard=_within)
    refused("fully_shard was called only for modules in it", within)
    without = Training(rank, "LoopedBFS", attached=False, shard=_without_gain)
    refused("parameter 'gain' is in ignored_params", without)
    for block in without.blocks:
        block.gain.requires_grad_(False)
    commlayer.pipeline.attach(without.schedule, without.optimizer, without.dp).remove()


def _within(block: Block) -> None:
    for module in (block.inner, block.outer):
        fully_shard(module, mesh=mesh()["dp"])


def _without_gain(block: Block) -> None:
    fully_shard(block, mesh=mesh()["dp"], ignored_params={block.gain})


@ranks.on(4, on_fake)
def test_another_policy_after_remove(rank: int, size: int) -> None:
    training = Training(rank, "LoopedBFS", attached=False, sharded=True)
    module: Any = training.blocks[0]
    for codec in ("int8", "bf16", "none"):
        policy = commlayer.Policy(codec=codec)
        handle = commlayer.pipeline.attach(training.schedule, training.optimizer, training.dp, policy=policy)
        assert groups_of(module._get_fsdp_state())[0]._reduce_scatter_comm.policy.codec == codec
        handle.remove()
    for block in training.blocks:
        commlayer.compress_fsdp(block, commlayer.Policy(codec="int8"))
    commlayer.pipeline.attach(training.schedule, training.optimizer, training.dp).remove()
    with pytest.raises(commlayer.ConfigError, match="compress_fsdp has given this model a policy"):
        commlayer.pipeline.attach(training.schedule, training.optimizer, training.dp, policy=commlayer.Policy())
