"""A process that takes over a state goes on with the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from commlayer.errors import ConfigError
from commlayer.frontend.group.newcomers import difference
from commlayer.frontend.group.state import State, checksum


def build(seed: int, momentum: float = 0.9) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("scratch", torch.rand(2), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * seed, momentum=momentum)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], 0.5)


def steps(model: nn.Module, state: State, count: int) -> None:
    for step in range(count):
        model.zero_grad()
        model(torch.rand(5, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        state.step()


def tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def test_a_state_goes_on_elsewhere() -> None:
    one, other = build(1), build(2)
    states = State(*one), State(*other)
    assert difference(states[0].settings(), states[1].settings(), "here", "there") == ""
    steps(one[0], states[0], 4)
    packed = states[0].pack().packed()
    steps(other[0], states[1], 1)  # it has a state of its own
    states[1].load(packed)
    for (model, optimizer, schedule), state in ((one, states[0]), (other, states[1])):
        steps(model, state, 3)
        assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (7, 0.025)
    assert all(torch.equal(*each) for each in zip(tensors(one[0]), tensors(other[0]), strict=True))


def test_a_batch_that_is_made_again_finds_all_as_before() -> None:
    model, optimizer, schedule = build(1)
    state = State(model, optimizer, schedule)
    found = []
    for _ in range(2):
        state.keep()
        values = torch.rand(5, 3)
        model(values)
        found.append((values, [each.clone() for each in model.buffers()]))
        state.restore()
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(*each) for each in zip(found[0][1], found[1][1], strict=True))


def test_differences_are_named() -> None:
    model, optimizer, _ = build(1)
    wide = nn.Sequential(nn.Linear(3, 5))
    plain = State(model, optimizer, None).settings()
    other = State(wide, torch.optim.Adam(wide.parameters()), None).settings()
    assert difference(plain, other, "here", "there") == (
        "the model (0.weight) is float32[4, 3] (trained) here and float32[5, 3] (trained) there"
    )
    assert "the optimizer (SGD) is [['0.weight', " in difference(
        plain, {**plain, "the optimizer": other["the optimizer"]}, "", ""
    )
    assert difference({"a": 1}, {"b": 1}, "here", "there") == "a is 1 here and not set there"


def test_states_that_cannot_travel_are_refused() -> None:
    model, optimizer, _ = build(1)
    State(model, optimizer, None).check("here")
    State(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)).check("here")
    numpy = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.float64(0.5) ** epoch)
    with pytest.raises(ConfigError, match=r"here: the state of SGD cannot travel .*no numpy values"):
        State(model, optimizer, numpy).check("here")
    own = torch.optim.lr_scheduler.StepLR(build(1)[1], 3)
    own.warm = lambda: 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="the state of StepLR cannot travel"):
        State(model, build(1)[1], own).check("here")


def test_parameters_in_another_order_differ() -> None:
    def model(*names: str) -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})

    one, other = (
        State(made, torch.optim.SGD(made.parameters(), lr=0.1), None) for made in (model("a", "b"), model("b", "a"))
    )
    told = difference(one.settings(), other.settings(), "here", "there")
    assert told.startswith("the order of the parameters is ['a.weight'"), told


class Halved(torch.optim.Optimizer):
    """Keeps its state in 16 bits."""

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                moment = self.state[each].setdefault("moment", torch.zeros_like(each, dtype=torch.bfloat16))
                moment.mul_(0.9).add_(each.grad.bfloat16())
                each.sub_(0.01 * moment.float())


def test_a_state_of_another_type_than_its_parameter_keeps_it() -> None:
    models = [build(seed)[0] for seed in (1, 2)]
    states = [State(model, Halved(model.parameters(), {}), None) for model in models]
    steps(models[0], states[0], 2)
    states[1].load(states[0].pack().packed())
    assert states[0].sums() == states[1].sums()
    for model, state in zip(models, states, strict=True):
        steps(model, state, 3)
    assert all(torch.equal(*each) for each in zip(*map(tensors, models), strict=True))
    assert {each["moment"].dtype for each in states[1]._optimizer.state.values()} == {torch.bfloat16}


def test_sums_tell_parameters_and_the_optimizers_state_apart() -> None:
    found = []
    for seed, momentum, count in ((1, 0.9, 3), (1, 0.9, 3), (2, 0.9, 3), (1, 0.8, 1), (1, 0.8, 2)):
        model, optimizer, schedule = build(seed, momentum)
        state = State(model, optimizer, schedule)
        steps(model, state, count)
        found.append((state.sums(), state.hyperparameters()))
    assert found[0] == found[1]
    assert len({sums for sums, _ in found}) == 4
    assert found[0][1] != found[2][1]
    assert "'lr': 0.05, 'momentum': 0.9" in found[0][1]
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-6
    assert state.sums() != found[4][0]
    assert 0 < checksum(state.sums()) <= 1 << 16


def test_a_model_in_ddp_has_the_same_hyperparameters() -> None:
    model = nn.Linear(2, 1)
    given = [list(model.named_parameters()), [(f"module.{name}", each) for name, each in model.named_parameters()]]
    found = {State(model, torch.optim.SGD(each, lr=torch.tensor(0.5)), None).hyperparameters() for each in given}
    assert len(found) == 1
    assert "'lr': 0.5" in found.pop()


def test_a_course_goes_on_elsewhere_without_the_state_of_the_optimizer() -> None:
    one, other = build(1), build(2)
    states = State(*one), State(*other)
    steps(one[0], states[0], 4)
    steps(other[0], states[1], 1)
    states[1].follow(states[0].course(), 2)
    assert not other[1].state
    assert (other[2].last_epoch, other[1].param_groups[0]["lr"]) == (6, 0.025)
    assert one[1].param_groups[0]["lr"] == 0.05
    assert other[1].param_groups[0]["params"] == list(other[0].parameters())
