"""Pipelines whose stages torch.compile runs: training is bit by bit that of the same stages with a plain reduction."""

from typing import Any

import pytest
import torch

import commlayer
from tests import ranks
from tests.pipelines import Block, Training, compare, compare_late, compiled_in_place, usual

DEFER = [{"defer": True}]


def wrapped(block: Block) -> Any:
    """Its backward pass is one node of autograd."""
    return torch.compile(block, backend="aot_eager")


def in_parts(block: Block) -> Block:
    block.inner.compile(backend="eager")
    block.outer.compile(backend="eager")
    return block


@ranks.on(4, ranks.run_job)
def test_wrapped_stages(rank: int, size: int) -> None:
    for schedule in ("1F1B", "LoopedBFS"):
        compare(rank, usual, schedule, modes=DEFER, compiled=wrapped)


@ranks.on(4, ranks.run_job)
def test_stages_compiled_in_place_and_in_parts(rank: int, size: int) -> None:
    compare(rank, usual, "LoopedBFS", compiled=compiled_in_place)
    compare_late(rank, usual, "1F1B", steps=3, compiled=compiled_in_place)
    compare(rank, usual, "LoopedBFS", modes=DEFER, compiled=in_parts)


@ranks.on(4, ranks.run_job)
def test_sharded_stages(rank: int, size: int) -> None:
    compare(rank, usual, "LoopedBFS", modes=DEFER, sharded=True, compiled=compiled_in_place)
    training = Training(rank, "LoopedBFS", attached=False, sharded=True, compiled=wrapped)
    with pytest.raises(commlayer.ConfigError, match=r"stage \d is the result of torch.compile\(.*; use module.comp"):
        commlayer.pipeline.attach(training.schedule, training.optimizer, training.dp)
