"""Drift between the ranks' copies of a model: measured, limited, and ended."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from commlayer import ConfigError, Replicas
from tests import fake_transport, ranks


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 1)).to(dtype)


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).double()


def _measure(rank: int, size: int, dtype: torch.dtype) -> tuple[float, dict[str, float], float]:
    with ranks.job(rank, size):
        net = model(dtype=dtype)
        replicas = Replicas(net)
        assert math.isnan(replicas.drift)
        assert replicas.measure() == 0.0
        before = flat(net)
        replicas.average()
        torch.testing.assert_close(flat(net), before, rtol=1e-6, atol=0)  # a third of the sum of three, rounded
        with torch.no_grad():
            net.get_parameter("1.weight").add_(
                torch.randn(30, generator=torch.Generator().manual_seed(rank)), alpha=0.1
            )
        theirs = flat(net)
        replicas.measure()
        replicas.average()
        assert replicas.averaged == 2
        exact = float((theirs - flat(net)).norm() ** 2)
        return exact, replicas.drift_of, replicas.drift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drift_is_the_distance_from_the_mean(dtype: torch.dtype) -> None:
    found = ranks.run(_measure, 3, dtype)
    assert found[0][1:] == found[1][1:] == found[2][1:]  # the same number on all ranks
    _, drift_of, drift = found[0]
    assert {name: value for name, value in drift_of.items() if value} == {"1.weight": drift_of["1.weight"]}
    net = model(dtype=dtype)
    norms = {name: float(parameter.detach().double().norm()) for name, parameter in net.named_parameters()}
    distance = math.sqrt(sum(exact for exact, _, _ in found) / 3)
    assert drift == pytest.approx(distance / math.hypot(*norms.values()), rel=0.5)
    assert drift_of["1.weight"] == pytest.approx(distance / norms["1.weight"], rel=0.5)


def _train(rank: int, size: int, how: dict[str, Any]) -> tuple[list[int], bytes, bytes]:
    """Each rank's gradients are its own; returns the steps after which all were equal, parameters, and momentum."""
    with ranks.job(rank, size):
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        replicas = Replicas(net, optimizer, **how)
        generator = torch.Generator().manual_seed(rank)
        averaged = []
        for step in range(1, 13):
            for parameter in net.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            before = replicas.averaged
            optimizer.step()
            if replicas.averaged > before:
                averaged.append(step)
            with pytest.raises(ConfigError, match=rf"rank {rank}: Replicas.step\(\): the optimizer's steps count"):
                replicas.step()
        momentum = torch.cat([optimizer.state[each]["exp_avg"].flatten() for each in net.parameters()])
        replicas.close()
        optimizer.step()
        assert replicas.steps == 12
        replicas.step()  # counts now, as nothing else does
        assert replicas.steps == 13
        return averaged, flat(net).numpy().tobytes(), momentum.numpy().tobytes()


def test_replicas_are_averaged_every_few_steps() -> None:
    found = ranks.run(_train, 2, {"every_steps": 4})
    assert [averaged for averaged, _, _ in found] == [[4, 8, 12]] * 2
    assert found[0][2] == found[1][2]  # the optimizer's state, too


def test_replicas_are_averaged_when_they_have_drifted_too_far() -> None:
    found = ranks.run(_train, 2, {"every_steps": None, "limit": 0.05, "check_steps": 3})
    assert found[0][0] == found[1][0]
    assert found[0][0]
    assert set(found[0][0]) <= {3, 6, 9, 12}
    assert ranks.run(_train, 2, {"every_steps": None, "limit": 1e9})[0][0] == []


def _apart(rank: int, size: int) -> float:
    """The drift of models that have nothing in common."""
    fake_transport.install()
    with ranks.job(rank, size):
        replicas = Replicas(model(seed=rank), every_steps=1)
        replicas.step()
        drift = replicas.drift
        replicas.measure()
        assert replicas.drift == 0.0
        return drift


def test_what_was_far_apart_is_equal_afterwards() -> None:
    assert min(ranks.run(_apart, 2)) > 0.1


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"every_steps": 0}, r"Replicas\(every_steps=0\)"),
        ({"check_steps": None}, r"Replicas\(check_steps=None\)"),
        ({"check_steps": 1.5}, r"Replicas\(check_steps=1.5\)"),
        ({"every_steps": True}, r"Replicas\(every_steps=True\)"),
        ({"limit": "x"}, r"Replicas\(limit='x'\): use a relative drift"),
        ({"limit": 0.0}, r"Replicas\(limit=0.0\)"),
        ({"limit": math.nan}, r"Replicas\(limit=nan\)"),
        ({"limit": math.inf}, r"Replicas\(limit=inf\): use .*, or None"),
        ({"model": None}, r"Replicas\(model=None\): give the model"),
        ({"optimizer": "sgd"}, r"Replicas\(optimizer='sgd'\): give the model's torch.optim.Optimizer, or None"),
    ],
)
def test_what_is_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Replicas(**{"model": nn.Linear(1, 1), **bad})
