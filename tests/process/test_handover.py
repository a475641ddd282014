"""The codec changes from step to step: what one codec owes, the next one adds, and nothing twice."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commlayer
from commlayer.compress.choice import Choice
from commlayer.frontend.gradients import hook_state
from tests import ranks
from tests.drift import SHAPES, check_equal, directions, hooked, mean, step_of
from tests.residual import total

FACTORED = (0, 2)
"""Indices of the parameters that `powersgd:2` compresses."""


def owed(model: Any, state: commlayer.HookState, size: int) -> list[Tensor]:
    """The mean over the ranks of residuals and of errors of low-rank factors, by parameter."""
    powersgd = state.low_rank.state_dict()["powersgd"]
    errors = {} if powersgd is None else powersgd["errors"]
    found = []
    for i, parameter in enumerate(model.parameters()):
        left = total(state.feedback, parameter).double()
        left += errors.get(len(SHAPES) - 1 - i, torch.zeros(parameter.shape))
        dist.all_reduce(left)
        found.append(left / size)
    return found


class Summed:
    """Sums of the averages and of the exact means over steps."""

    def __init__(self) -> None:
        self.averages, self.exact = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))

    def step(self, model: Any, rank: int, size: int, step: int) -> None:
        gradients = step_of(model, directions(rank, step))
        check_equal(gradients, size)
        for i, (gradient, right) in enumerate(zip(gradients, mean(size, step), strict=True)):
            self.averages[i] += gradient
            self.exact[i] += right

    def check(self, left: Sequence[Tensor]) -> None:
        """That averages and debts are the exact sum, up to 8 bits where no errors are kept."""
        for average, kept, right in zip(self.averages, left, self.exact, strict=True):
            error = (average + kept - right).square().mean() / right.square().mean()
            assert error < 2e-4  # 0.004 if the errors of one step with 4 bits were forgotten


def is_owed(left: Sequence[Tensor]) -> list[int]:
    return [i for i, kept in enumerate(left) if kept.any()]


ORDERS = [
    ["int4", "int4", "powersgd:2", "powersgd:2", "int4"],
    ["powersgd:2", "sign", "powersgd:2", "bf16", "none"],
    ["powersgd:2", "powersgd:4", "int8", "int4", "powersgd:2"],
]


@pytest.mark.parametrize("codecs", ORDERS)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_new_codec_adds_what_the_old_one_owes(rank: int, size: int, codecs: list[str]) -> None:
    model, state = hooked(commlayer.Policy())
    summed = Summed()
    for step, codec in enumerate(codecs):
        state.policy = commlayer.Policy(codec=codec, exact_steps=0)
        summed.step(model, rank, size, step)
        left = owed(model, state, size)
        summed.check(left)
        keeping = {"int4": [0, 2, 3], "sign": [0, 2, 3]}
        assert is_owed(left) == keeping.get(codec, list(FACTORED) if codec.startswith("powersgd") else [])
        if not codec.startswith("powersgd"):
            assert not (state.low_rank.state_dict()["powersgd"] or {"errors": {}})["errors"]


class Script(Choice):
    """Chooses the given codecs, by step and bucket."""

    script: Sequence[Sequence[str]] = ()
    steps = 0

    def begin_step(self, step: int, now_s: float, agree: Any) -> None:  # noqa: ARG002
        self.steps += 1

    def codec(self, index: int) -> str:
        return self.script[self.steps - 1][index]


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_buckets_of_one_step_may_have_different_codecs(rank: int, size: int) -> None:
    script = Script([], 0.5, allow_state=True)
    script.script = [
        ["powersgd:2", "int4"],
        ["int4", "powersgd:2"],
        ["powersgd:2", "powersgd:2"],
        ["none", "powersgd:2"],
        ["sign", "int8"],
        ["bf16", "none"],
    ]
    vars(hook_state)["choice_for"] = lambda *_, **__: script  # this process ends with the test
    model, state = hooked(commlayer.Policy(codec="auto", allow_state=True), finds_unused=True, bucket_cap_mb=0.1)
    summed = Summed()
    for step in range(len(script.script)):
        summed.step(model, rank, size, step)
        summed.check(owed(model, state, size))
    assert state._buckets == 2
    assert is_owed(owed(model, state, size)) == []


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_errors_of_a_checkpoint_reach_another_codec(rank: int, size: int) -> None:
    model, state = hooked(commlayer.Policy(codec="powersgd:2"))
    summed = Summed()
    for step in range(2):
        summed.step(model, rank, size, step)
    saved = state.state_dict()
    model, state = hooked(commlayer.Policy())
    state.load_state_dict(saved)
    state.policy = commlayer.Policy(codec="int8")
    summed.step(model, rank, size, 2)
    assert is_owed(owed(model, state, size)) == []
    summed.check(owed(model, state, size))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_errors_of_unused_parameters_wait_for_the_new_codec_too(rank: int, size: int) -> None:
    model, state = hooked(commlayer.Policy(codec="powersgd:2"), finds_unused=True)
    step_of(model, directions(rank, 0))
    before = owed(model, state, size)
    state.policy = commlayer.Policy(codec="int8")
    step_of(model, [None, *directions(rank, 1)[1:]])
    after = owed(model, state, size)
    assert torch.equal(before[0], after[0])
    assert not after[2].any()
