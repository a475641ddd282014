"""Buckets start while a backward pass goes on, in their order; a step has each gradient as the pass left it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commlayer.errors import ConfigError
from commlayer.frontend.elastic import averages as module
from commlayer.frontend.elastic.averages import Averages, Told
from commlayer.frontend.elastic.contribution import Contribution
from commlayer.frontend.elastic.overlap import Overlap


class Loop:
    """A model of four layers, each a bucket, and the order of what happened: buckets by their begin, and gradients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "BUCKET_BYTES", 4 * 12)
        self.layers = [nn.Linear(3, 3) for _ in range(4)]
        self.parameters = [each for layer in self.layers for each in layer.parameters()]
        self.averages = Averages(self.parameters)
        self.events: list[Any] = []
        self.contribution: Contribution | None = None
        for number, layer in enumerate(self.layers):
            layer.bias.register_post_accumulate_grad_hook(lambda _, number=number: self.events.append(number))
        self.kind = "first"
        self.overlap = Overlap(self.parameters, self.begin, lambda: self.kind)

    def begin(self) -> Contribution:
        self.contribution = Contribution(self.averages, 1, 1.0, self.average)
        return self.contribution

    def average(self, values: Tensor) -> None:
        self.events.append(f"bucket {values.storage_offset() // 12}")

    def backward(self, *layers: int) -> None:
        """A pass through these layers."""
        found = torch.ones(2, 3)
        for layer in layers or range(4):
            found = self.layers[layer](found)
        found.sum().backward()

    def step(self) -> Tensor:
        """Ends the step; returns its vector."""
        contribution = self.contribution or Contribution(self.averages, 1, 1.0, self.average)
        contribution.finish(0, Told())
        expected = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters[::-1]]
        assert torch.equal(
            contribution.vector[: self.averages.values], torch.cat([each.flatten() for each in expected])
        )
        self.overlap.stepped()
        self.contribution = None
        for each in self.parameters:
            each.grad = None
        events, self.events = self.events, []
        self.seen = events
        return contribution.vector


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


def test_buckets_start_within_the_second_step(loop: Loop) -> None:
    assert [(each.begin, each.end) for each in loop.averages.buckets] == [(0, 12), (12, 24), (24, 36), (36, 48)]
    loop.backward()
    loop.step()
    assert loop.seen == [3, 2, 1, 0, "bucket 0", "bucket 1", "bucket 2"]
    loop.backward()
    loop.step()
    assert [loop.seen.index(f"bucket {at}") < loop.seen.index(2 - at) for at in range(3)] == [True] * 3
    assert [each for each in loop.seen if isinstance(each, str)] == ["bucket 0", "bucket 1", "bucket 2"]


def test_random_passes_keep_the_order_and_the_gradients(loop: Loop) -> None:
    draw = random.Random(3)
    for _ in range(30):
        loop.backward(*draw.sample(range(4), draw.randint(1, 4)))
        loop.step()
        assert [each for each in loop.seen if isinstance(each, str)] == ["bucket 0", "bucket 1", "bucket 2"]


def test_a_step_of_several_passes_starts_in_the_last(loop: Loop) -> None:
    for number in range(3):
        loop.backward()
        loop.backward()
        if number:
            assert loop.seen is not loop.events
            assert loop.events.index("bucket 0") > 4
        loop.step()
    for passes in (1, 2):  # fewer: the step sends all
        for _ in range(passes):
            loop.backward()
        assert ("bucket 0" in loop.events) == (passes == 2)
        loop.step()
    loop.backward()
    loop.backward()
    with pytest.raises(ConfigError, match=r"another backward pass of a step, .* on their way since pass 2"):
        loop.backward()


def test_steps_of_another_kind_have_other_numbers_of_passes(loop: Loop) -> None:
    """Shares grow after a death, and the last batch of an epoch is short."""
    for kind, passes, is_known in (("first", 1, False), ("other", 3, False), ("first", 1, True), ("other", 3, True)):
        loop.kind = kind
        for _ in range(passes):
            loop.backward()
        assert ("bucket 0" in loop.events) == is_known
        loop.step()


@pytest.mark.parametrize("by_data", [True, False])
def test_a_changed_gradient_is_an_error(loop: Loop, by_data: bool) -> None:
    loop.backward()
    torch.nn.utils.clip_grad_norm_(loop.parameters, 1e-3)  # nothing is on its way yet
    loop.step()
    loop.backward()
    if by_data:
        loop.layers[3].weight.grad.data.mul_(0.5)  # type: ignore[union-attr]  # torch counts no change
    else:
        torch.nn.utils.clip_grad_norm_(loop.parameters, 1e-3)
    with pytest.raises(ConfigError, match=r"changed between the backward pass and job.step\(\).*clip_norm"):
        loop.step()


def test_a_gradient_that_comes_more_often_than_before_is_an_error(loop: Loop) -> None:
    loop.backward()
    loop.step()
    inputs = torch.ones(2, 3, requires_grad=True)
    found = loop.layers[3](checkpoint(loop.layers[3], inputs, use_reentrant=True))
    with pytest.raises(ConfigError, match="accumulated more often than in the steps before"):
        found.sum().backward()


def test_an_error_of_an_average_is_raised_by_the_step(loop: Loop) -> None:
    def fails(values: Tensor) -> None:
        loop.events.append("bucket 0")
        raise RuntimeError("the network is gone")

    loop.backward()
    loop.step()
    loop.average = fails  # type: ignore[method-assign]
    loop.backward()
    assert loop.events.count("bucket 0") == 1  # none after it
    with pytest.raises(RuntimeError, match="the network is gone"):
        loop.step()
