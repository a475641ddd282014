"""`Weights`: buffers that a model replaces, and changes of what the sites do not share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from commlayer import CommError, ConfigError
from commlayer.frontend.local.weights import Told, Weights


class Smoothed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.frozen = nn.Linear(3, 2).requires_grad_(False)
        self.register_buffer("ema", torch.ones(3))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))


def weights_of(model: Any, buffers: str | None) -> Weights:
    found = Weights(model, torch.optim.SGD(model.layer.parameters(), lr=0.1), buffers)
    found.rank = 7
    return found


def test_a_buffer_that_the_model_has_replaced_is_averaged() -> None:
    model: Any = Smoothed()
    weights = weights_of(model, "average")
    model.ema = 0.5 * model.ema
    assert weights.flat_buffers().tolist() == [0.5, 0.5, 0.5]
    weights.put_buffers(torch.tensor([1.0, 2.0, 3.0]))
    assert model.ema.tolist() == [1.0, 2.0, 3.0]
    weights.check_unchanged()


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (torch.ones(4), r"has become \[4\] torch.float32 cpu"),
        (torch.ones(3).double(), r"has become \[3\] torch.float64 cpu"),
        (None, "is gone"),
    ],
)
def test_a_buffer_of_another_form_is_named(other: Any, text: str) -> None:
    model: Any = Smoothed()
    weights = weights_of(model, "average")
    model.ema = other
    found = rf"rank 7: LocalSteps\(Smoothed\): the buffer 'ema' was \[3\] torch.float32 cpu .*{text}.*buffers='own'"
    for use in (weights.check_unchanged, weights.flat_buffers, lambda: weights.put_buffers(torch.ones(3))):
        with pytest.raises(ConfigError, match=found):
            use()


def test_a_buffer_that_is_not_finite() -> None:
    model: Any = Smoothed()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0]))
    weights = weights_of(model, "average")
    assert weights.spoiled(weights.flat_buffers()) == 0  # the mask is, on all ranks alike
    for name, number in (("mask", 2), ("ema", 1)):
        for value in (torch.inf, -torch.inf, torch.nan):
            before = getattr(model, name).clone()
            getattr(model, name)[2] = value
            assert weights.spoiled(weights.flat_buffers()) == number
            getattr(model, name).copy_(before)
    model.mask[1] = torch.nan
    assert weights.spoiled(weights.flat_buffers()) == 2
    with pytest.raises(CommError, match="the buffer 'mask' of rank 5 is not finite; the sites must not") as caught:
        weights.check_told({0: Told(), 5: Told(spoiled=2)})
    assert caught.value.culprit == 5


def test_a_watched_buffer_that_the_model_has_replaced() -> None:
    model: Any = Smoothed()
    weights = weights_of(model, None)
    for same in (lambda: model.ema.clone(), lambda: model.ema.fill_(1)):
        model.ema = same()  # type: ignore[no-untyped-call]
        weights.check_unchanged()
    for other in (2 * model.ema, torch.ones(1, 3), None):
        model.ema = other
        with pytest.raises(ConfigError, match=r"rank 7: LocalSteps\(Smoothed\): 'ema' has changed"):
            weights.check_unchanged()


@pytest.mark.parametrize("name", ["frozen.bias", "ema"])
def test_a_change_through_data_is_found_at_the_end(name: str) -> None:
    model: Any = Smoothed()
    weights = weights_of(model, None)
    before = weights.at_end()
    tensor = dict(model.named_parameters())[name] if "." in name else model.ema
    tensor.data.mul_(2)
    weights.check_unchanged()
    after = weights.at_end()
    for alike in ((before, before), (after, after), (after, Told()), (Told(), Told())):
        weights.check_told(dict(zip((0, 5), alike, strict=True)))
    for changed, told in ((5, (before, before, after)), (0, (after, before, before)), (3, (before, after, after))):
        with pytest.raises(ConfigError, match=f"on rank {changed}, '{name}' has changed") as caught:
            weights.check_told(dict(zip((0, 3, 5), told, strict=True)))
        assert caught.value.culprit == changed
