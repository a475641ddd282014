"""Steps of optimizers, as the flight recorder and `commlayer top` learn of them."""

from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from commlayer.frontend.group import steps
from commlayer.frontend.group.steps import after_step, watch_steps
from commlayer.scheduler.deferred import DeferredStep
from commlayer.scheduler.gradient import PendingReduction
from commlayer.telemetry.meter import Meter
from commlayer.transport.flight import Recorder


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    made = Meter()
    monkeypatch.setattr(steps, "meter", made)
    return made


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(steps, "recorder", made)
    watch_steps()
    watch_steps()
    return made


def numbers(recorder: Recorder) -> list[int]:
    return [step["number"] for step in recorder.dump("test")["steps"]]


def test_the_optimizer_with_most_steps_counts(recorder: Recorder) -> None:
    first, second = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2))
    for _ in range(3):
        first.step()
        second.step()
    first.step()
    assert numbers(recorder) == [1, 2, 3, 4]
    ends = [step["ended_ns"] for step in recorder.dump("test")["steps"]]
    assert ends == sorted(ends)


def test_the_meter_is_told_while_it_is_on(recorder: Recorder, meter: Meter) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.step()
    assert meter.read()[1] == []
    meter.turn_on()
    optimizer.step()
    assert len(meter.read()[1]) == 1


def test_deferred_steps_stay_deferred_and_count_once(recorder: Recorder) -> None:
    """The hook reads no parameters: `overlap` need not wait for the gradients because of it."""
    assert list(_global_optimizer_post_hooks.values()).count(after_step) == 1
    parameters = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    deferred = DeferredStep(optimizer)
    waited: list[Any] = []
    for parameter in parameters:
        parameter.grad = torch.ones(1)
        deferred.add(PendingReduction(lambda: waited.append(1), {parameter: parameter.grad}))
    optimizer.step()
    assert waited == []
    deferred.finish()
    assert len(waited) == 2
    assert numbers(recorder) == [1]
    deferred.remove()
