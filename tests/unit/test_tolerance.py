"""Tolerances: the rules by themselves."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import commlayer
from commlayer import ByLayer, BySteps, ConfigError, GradientNorm, Tolerance

ANY = torch.zeros(1)


def alone(value: float) -> float:
    return value


def test_a_schedule_holds_from_step_to_step() -> None:
    schedule = BySteps({100: 0.03, 0: 0.001, 2000: 0.0})
    assert [schedule.loss_bound(step, ANY) for step in (0, 99, 100, 1999, 2000, 10**9)] == [
        0.001,
        0.001,
        0.03,
        0.03,
        0,
        0,
    ]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.norm, self.head = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)


def test_layers_have_bounds_by_name() -> None:
    model = Layers()
    steps = BySteps({0: 0.2, 5: 0.3})
    layers = ByLayer(model, {"*.bias": 0.0, "norm.*": 0.01, "head.*": steps}, otherwise=0.1)
    named = dict(model.named_parameters())
    at = {name: layers.loss_bound(7, parameter) for name, parameter in named.items()}
    assert at.pop("front.weight") == 0.1
    assert at.pop("norm.weight") == 0.01
    assert at.pop("head.weight") == 0.3
    assert set(at.values()) == {0.0}
    with pytest.raises(ConfigError, match=r"shape \(1,\) belongs to another model"):
        layers.loss_bound(0, ANY)


def test_a_pattern_for_all_comes_before_otherwise() -> None:
    model = Layers()
    everything = ByLayer(model, {"*": 0.1}, otherwise=0.3)
    assert {everything.loss_bound(0, parameter) for parameter in model.parameters()} == {0.1}
    last = ByLayer(model, {"*.bias": 0.0, "*": BySteps({0: 0.2})}, otherwise=0.3)
    at = {name: last.loss_bound(0, parameter) for name, parameter in model.named_parameters()}
    assert {bound for name, bound in at.items() if name.endswith("bias")} == {0.0}
    assert {bound for name, bound in at.items() if not name.endswith("bias")} == {0.2}


def test_bounds_may_be_numbers_of_any_type() -> None:
    bound = np.float32(0.25)
    model = Layers()
    assert BySteps({np.int64(0): bound}).loss_bound(0, ANY) == 0.25
    assert ByLayer(model, {"head.*": bound}, bound).loss_bound(0, model.head.weight) == 0.25
    assert GradientNorm(bound, bound, every_steps=np.int64(1)).loss_bound(0, ANY) == 0.25


def train(rule: Tolerance, norms: list[float], buckets: int = 2) -> list[float]:
    """The bound of each step, where each step's gradient has a norm that is spread over buckets."""
    bounds = []
    for step, norm in enumerate(norms):
        rule.begin(step, alone)
        bounds.append(rule.loss_bound(step, ANY))
        for bucket in reversed(range(buckets)):
            rule.observe(step, bucket, torch.full((4,), norm / math.sqrt(4 * buckets)))
    return bounds


def test_the_bound_is_low_while_the_norm_changes() -> None:
    rule = GradientNorm(0.01, 0.4, every_steps=2, threshold=0.2)
    norms = [9.0, 9.0, 9.0, 9.0, 9.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.1, 5.0]
    low, high = [0.01] * 2, [0.4] * 2
    assert train(rule, norms) == low + low + high + low + high + high
    assert not rule.critical


def test_a_window_is_measured_at_its_end() -> None:
    rule = GradientNorm(0.0, 0.4, every_steps=20)
    train(rule, [100.0] * 18 + [2.0, 4.0] + [0.0])
    assert rule.state_dict()["norm"] == pytest.approx(3.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_that_are_not_finite_do_not_count(bad: float) -> None:
    rule = GradientNorm(0.01, 0.4, every_steps=1)
    assert train(rule, [3.0, 3.0, 3.0, bad, 3.0, 3.0, 3.0])[2:] == [0.4, 0.4, 0.01, 0.01, 0.4]


def test_every_rank_decides_by_the_largest_norm() -> None:
    rule = GradientNorm(0.01, 0.4, every_steps=1)
    train(rule, [3.0] * 3)
    rule.begin(3, lambda own: max(own, 30.0))
    assert rule.critical


def test_rules_are_saved() -> None:
    def rule() -> GradientNorm:
        return GradientNorm(0.01, 0.4, every_steps=1)

    saved = rule()
    train(saved, [3.0] * 3)
    restored = rule()
    restored.load_state_dict(saved.state_dict())
    assert not restored.critical
    restored.observe(2, 0, torch.tensor([3.0]))
    restored.begin(3, alone)
    assert not restored.critical
    model = Layers()
    layers = ByLayer(model, {"head.*": saved}, otherwise=0.1)
    fresh = rule()
    other = ByLayer(model, {"head.*": fresh}, otherwise=0.1)
    other.load_state_dict(layers.state_dict())
    assert not fresh.critical


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BySteps({}), r"BySteps\(\{\}\): use whole numbers of steps, the first of them 0"),
        (lambda: BySteps([(0, 0.1)]), r"BySteps\(\[\(0, 0.1\)\]\): .*as \{0: 0.001, 2000: 0.03\}"),  # type: ignore[arg-type]
        (lambda: BySteps({1: 0.1}), "the first of them 0"),
        (lambda: BySteps({0: 1e-7}), r"BySteps\(\{0: 1e-07\}\): use a number, 0 \(no loss\), or 0.000001 to 0.5"),
        (lambda: BySteps({0: 0.1, 1.5: 0.1}), "whole numbers"),  # type: ignore[dict-item]
        (lambda: BySteps({0: 0.1, 9: 0.6}), r"BySteps\(\{9: 0.6\}\): use a number, 0 \(no loss\)"),
        (lambda: BySteps({0: math.nan}), r"BySteps\(\{0: nan\}\)"),
        (lambda: ByLayer(Layers(), {"haed.*": 0.1}, 0.1), "'haed.*' matches no parameter's name"),
        (lambda: ByLayer(Layers(), {"head.*": -0.1}, 0.1), "ByLayer: -0.1 for 'head"),
        (lambda: ByLayer(Layers(), {}, "much"), "ByLayer: 'much' for otherwise"),  # type: ignore[arg-type]
        (lambda: ByLayer(Layers(), ["head.*"], 0.1), r"ByLayer\(loss_bounds=\['head.\*'\]\): use patterns"),  # type: ignore[arg-type]
        (lambda: ByLayer(Layers(), {3: 0.2}, 0.1), r"ByLayer\(loss_bounds=\{3: 0.2\}\): use patterns"),  # type: ignore[dict-item]
        (lambda: ByLayer(None, {}, 0.1), r"ByLayer\(model=None\): give the model"),  # type: ignore[arg-type]
        (lambda: ByLayer(Layers(), {"*": 0.1, "head.*": 0.2}, 0.1), r"'head\.\*' is never used: earlier patterns"),
        (lambda: ByLayer(Layers(), {"head.w*": 0.1, "head.b*": 0.1, "head.*": 0.2}, 0.1), r"'head\.\*' is never used"),
        (lambda: GradientNorm(0.3, 0.2, every_steps=1), "use low <= high"),
        (lambda: GradientNorm(-0.3, 0.2, every_steps=1), r"GradientNorm\(low=-0.3\)"),
        (lambda: GradientNorm(0.3, 0.7, every_steps=1), r"GradientNorm\(high=0.7\)"),
        (lambda: GradientNorm(0.1, 0.2, every_steps=0), "every_steps=0"),
        (lambda: GradientNorm(0.1, 0.2, every_steps=True), "every_steps=True"),
        (lambda: GradientNorm(0.1, 0.2, every_steps=1, threshold=0), "threshold=0"),
        (lambda: GradientNorm(0.1, 0.2, every_steps=1, threshold="x"), "threshold='x'"),  # type: ignore[arg-type]
        (lambda: GradientNorm(0.1, 0.2, every_steps=1, threshold=math.inf), "threshold=inf"),
        (lambda: state(BySteps({0: 0.1}), loss_bound=0.1), "use one of both"),
        (lambda: state(BySteps({0: 0.1}), deterministic=True), "losses are random"),
        (lambda: state(BySteps({0: 0.1}), algorithm="ring"), "a ring adds up losses"),
    ],
)
def test_invalid_rules_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def state(tolerance: Tolerance, **policy: Any) -> commlayer.HookState:
    return commlayer.HookState(commlayer.Policy(**policy), tolerance=tolerance)
