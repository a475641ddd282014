"""Deferred steps: the parameters of a plain loop, whatever happens between `step()` and the next use."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from commlayer import ConfigError
from commlayer.scheduler.deferred import PER_PARAMETER, DeferredStep, is_in_parts
from commlayer.scheduler.gradient import PendingGradient, PendingReduction

SHAPES = [(3, 4), (4,), (5, 3), (5,), (2, 2)]
STEPS = 5

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD, nesterov, foreach": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adam, fused": lambda given: torch.optim.Adam(given, lr=0.01, fused=True),
    "Adam, amsgrad": lambda given: torch.optim.Adam(given, lr=0.01, amsgrad=True),
    "AdamW, foreach": lambda given: torch.optim.AdamW(given, lr=0.01, foreach=True),
    "AdamW, tensor": lambda given: torch.optim.AdamW(given, lr=torch.tensor(0.01), foreach=False),
} | {kind.__name__: lambda given, kind=kind: kind(given, lr=0.01) for kind in PER_PARAMETER if kind.__name__ != "Muon"}


class Run:
    """A loop over some parameters, whose gradients are drawn."""

    def __init__(self, make: Make, *, deferred: bool, staleness: int = 0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        half = [{"params": self.parameters[:3]}, {"params": self.parameters[3:], "weight_decay": 0.1}]
        self.optimizer = make(half)
        self.deferred = DeferredStep(self.optimizer, staleness) if deferred else None
        self.waits = 0

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for part in (self.parameters[:2], self.parameters[2:4], self.parameters[4:]):
            values = [torch.randn(parameter.shape, generator=generator) for parameter in part]
            if self.deferred is None:
                for parameter, value in zip(part, values, strict=True):
                    parameter.grad = value if parameter.grad is None else parameter.grad + value
            else:
                memory = [torch.full_like(parameter, torch.nan) for parameter in part]
                gradients: dict[Tensor, Tensor] = dict(zip(part, memory, strict=True))
                self.deferred.add(PendingReduction(self.arrival(memory, values), gradients))

    def one_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        self.optimizer.step()

    def arrival(self, memory: list[Tensor], values: list[Tensor]) -> Callable[[], None]:
        def wait() -> None:
            self.waits += 1
            for tensor, value in zip(memory, values, strict=True):
                tensor.copy_(value)

        return wait

    def forward(self, order: list[int]) -> list[Tensor]:
        """The parameters, as their uses see them."""
        seen = []
        for number in order:
            if self.deferred is not None:
                self.deferred.use([self.parameters[number]])
            seen.append(self.parameters[number].detach().clone())
        if self.deferred is not None:
            self.deferred.settle()
        return seen


def runs(make: Make, loop: Callable[[Run], Iterator[list[Tensor]]]) -> Run:
    """Runs a loop plainly and deferred, and compares all it yields; returns the deferred run."""
    plain, deferred = Run(make, deferred=False), Run(make, deferred=True)
    for number, (theirs, ours) in enumerate(zip(loop(plain), loop(deferred), strict=True)):
        for one, other in zip(theirs, ours, strict=True):
            assert torch.equal(one, other), number
    assert deferred.deferred is not None
    deferred.deferred.finish()
    for one, other in zip(plain.parameters, deferred.parameters, strict=True):
        assert torch.equal(one, other)
    return deferred


def orders(step: int) -> list[int]:
    return torch.randperm(len(SHAPES), generator=torch.Generator().manual_seed(step)).tolist()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_steps_are_those_of_the_plain_loop(name: str) -> None:
    def loop(run: Run) -> Iterator[list[Tensor]]:
        scheduler = StepLR(run.optimizer, 1, 0.7)
        for step in range(STEPS):
            yield run.forward(orders(step))
            run.backward(step)
            run.optimizer.step()
            scheduler.step()
            run.optimizer.zero_grad()

    deferred = runs(OPTIMIZERS[name], loop)
    assert deferred.waits == 3 * STEPS


def test_nothing_waits_before_the_next_use() -> None:
    run = Run(OPTIMIZERS["SGD"], deferred=True)
    run.backward(0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    assert run.waits == 0
    assert run.deferred is not None
    assert run.deferred.pending
    run.deferred.use([run.parameters[3]])
    assert run.waits == 1
    run.deferred.finish()
    assert run.waits == 3
    assert not run.deferred.pending


def test_all_hyperparameters_are_those_of_step() -> None:
    def loop(run: Run) -> Iterator[list[Tensor]]:
        scheduler = OneCycleLR(run.optimizer, 0.1, total_steps=STEPS + 1)  # changes momentum, too
        for step in range(STEPS):
            run.one_step(step)
            scheduler.step()
            for group in run.optimizer.param_groups:
                group["weight_decay"] = 0.05 * step
            yield run.forward(orders(step))

    runs(OPTIMIZERS["SGD"], loop)


def test_a_learning_rate_changed_in_place() -> None:
    def loop(run: Run) -> Iterator[list[Tensor]]:
        for step in range(STEPS):
            run.one_step(step)
            for group in run.optimizer.param_groups:
                group["lr"].mul_(0.5)
            yield run.forward(orders(step))

    runs(OPTIMIZERS["AdamW, tensor"], loop)


@pytest.mark.parametrize("to_none", [True, False, None])
def test_gradients_cleared_or_kept(to_none: bool | None) -> None:
    """None: they are cleared after the next forward pass only."""

    def loop(run: Run) -> Iterator[list[Tensor]]:
        for step in range(STEPS):
            run.backward(step)
            run.optimizer.step()
            if to_none is not None:
                run.optimizer.zero_grad(set_to_none=to_none)
            yield run.forward(orders(step))
            yield [] if to_none else [parameter.grad for parameter in run.parameters if parameter.grad is not None]
            run.optimizer.zero_grad()

    runs(OPTIMIZERS["SGD"], loop)


def test_step_twice() -> None:
    def loop(run: Run) -> Iterator[list[Tensor]]:
        run.backward(0)
        run.optimizer.step()
        run.optimizer.step()
        yield run.forward(orders(0))

    runs(OPTIMIZERS["SGD"], loop)


def test_clipping_waits_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def loop(run: Run) -> Iterator[list[Tensor]]:
        for step in range(STEPS):
            run.optimizer.zero_grad()
            run.backward(step)
            yield [nn.utils.clip_grad_norm_(run.parameters, 0.5)]
            run.optimizer.step()
            yield run.forward(orders(step))

    with caplog.at_level(logging.WARNING, "commlayer"):
        runs(OPTIMIZERS["AdamW"], loop)
    assert [record.message[:40] for record in caplog.records] == ["overlap: gradients are read before step("]


def test_parameters_without_or_with_other_gradients() -> None:
    def loop(run: Run) -> Iterator[list[Tensor]]:
        for step in range(STEPS):
            run.optimizer.zero_grad()
            run.backward(step)
            run.parameters[0].grad = None
            run.parameters[2].grad = torch.full(SHAPES[2], 0.5)
            run.optimizer.step()
            yield run.forward(orders(step))

    runs(OPTIMIZERS["AdamW"], loop)


def test_a_step_that_is_left_out() -> None:
    """A GradScaler does so after an overflow."""

    def loop(run: Run) -> Iterator[list[Tensor]]:
        for step in range(STEPS):
            run.optimizer.zero_grad()
            run.backward(step)
            if step % 2:
                run.optimizer.step()
            yield run.forward(orders(step))
            yield [parameter.grad for parameter in run.parameters if parameter.grad is not None]

    runs(OPTIMIZERS["AdamW"], loop)


def test_parameters_of_no_reduction_are_stepped_at_once() -> None:
    own = nn.Parameter(torch.ones(2))
    run = Run(lambda groups: torch.optim.SGD([*groups, {"params": [own]}], lr=1.0), deferred=True)
    run.backward(0)
    own.grad = torch.ones(2)
    run.optimizer.step()
    assert own.tolist() == [0.0, 0.0]
    assert run.waits == 0
    assert all(isinstance(parameter.grad, PendingGradient) for parameter in run.parameters)
    run.forward([])
    assert own.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu"), torch.no_grad])
def test_the_contexts_of_a_forward_pass_do_not_change_a_step(context: Callable[[], Any]) -> None:
    def loop(run: Run) -> Iterator[list[Tensor]]:
        for step in range(STEPS):
            run.one_step(step)
            with context():
                seen = run.forward(orders(step))
            yield [tensor.clone() for tensor in seen]

    runs(OPTIMIZERS["AdamW, foreach"], loop)


def test_other_hooks_of_the_optimizer_see_whole_steps() -> None:
    def loop(run: Run) -> Iterator[list[Tensor]]:
        average = [parameter.detach().clone() for parameter in run.parameters]

        def update(*_: Any) -> None:
            for mean, parameter in zip(average, run.parameters, strict=True):
                mean.lerp_(parameter.detach(), 0.5)

        run.optimizer.register_step_post_hook(update)
        for step in range(STEPS):
            run.one_step(step)
            yield run.forward(orders(step))
        yield average

    runs(OPTIMIZERS["SGD"], loop)


def test_hooks_that_read_nothing_leave_steps_deferred() -> None:
    """Such is that of a trial, which counts the steps of the caller."""
    seen: list[bool] = []

    def count(optimizer: Optimizer, *_: Any) -> None:
        seen.append(is_in_parts(optimizer))

    count.reads_nothing = True  # type: ignore[attr-defined]
    handle = register_optimizer_step_post_hook(count)
    try:
        run = Run(OPTIMIZERS["SGD"], deferred=True)
        run.backward(0)
        run.optimizer.step()
        assert (run.waits, seen) == (0, [False])
        assert run.deferred is not None
        run.deferred.finish()
        assert (run.waits, seen) == (3, [False, True, True, True])
    finally:
        handle.remove()


@pytest.mark.parametrize("clips", [False, True])
def test_staleness_one_is_the_rule_of_its_name(clips: bool) -> None:
    make = OPTIMIZERS["SGD"]
    plain, stale = Run(make, deferred=False), Run(make, deferred=True, staleness=1)
    schedulers = [StepLR(step.optimizer, 1, 0.7) for step in (plain, stale)]
    gradients: list[Tensor] | None = None
    for step in range(STEPS):
        for one, other in zip(plain.forward(orders(step)), stale.forward(orders(step)), strict=True):
            assert torch.equal(one, other), step
        # W(t+1) = W(t) - lr(t) g(W(t-1)), by the optimizer itself, with gradients kept by hand
        plain.optimizer.zero_grad()
        plain.backward(step)
        if clips:
            nn.utils.clip_grad_norm_(plain.parameters, 0.5)
        now = [parameter.grad for parameter in plain.parameters if parameter.grad is not None]
        for number, parameter in enumerate(plain.parameters):
            parameter.grad = None if gradients is None else gradients[number]
        plain.optimizer.step()
        gradients = now
        stale.backward(step)
        if clips:
            nn.utils.clip_grad_norm_(stale.parameters, 0.5)
        stale.optimizer.step()
        stale.optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    in_flight = 0 if clips else 2  # those of the last step, and of the step before
    assert stale.waits == 3 * (STEPS - in_flight)
    assert stale.deferred is not None
    stale.deferred.finish()
    assert clips or stale.waits == 3 * (STEPS - 1)
    stale.deferred.drain()
    assert stale.waits == 3 * STEPS
    assert not stale.deferred.pending


def test_staleness_one_needs_a_reduction_whose_gradients_were_read() -> None:
    run = Run(OPTIMIZERS["SGD"], deferred=True, staleness=1)
    assert run.deferred is not None
    run.backward(0)
    reductions = list(run.deferred._open)
    nn.utils.clip_grad_norm_(run.parameters, 0.5)
    run.optimizer.step()
    assert len(reductions) == 3
    assert all(map(run.deferred.needs, reductions))


def test_the_error_of_a_reduction_is_raised_at_each_use() -> None:
    run = Run(OPTIMIZERS["SGD"], deferred=True)
    assert run.deferred is not None

    def fail() -> None:
        raise ConnectionError("rank 1 is gone")

    gradients: dict[Tensor, Tensor] = {run.parameters[0]: torch.zeros(SHAPES[0])}
    run.deferred.add(PendingReduction(fail, gradients))
    run.optimizer.step()
    run.deferred.use([run.parameters[1]])
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        run.deferred.use([run.parameters[0]])
    for action in (run.deferred.finish, run.deferred.settle):
        with pytest.raises(ConnectionError, match="rank 1 is gone"):
            action()
    run.deferred.remove()
    run.deferred.finish()
    run.parameters[0].grad = torch.ones(SHAPES[0])
    run.optimizer.step()


class Lamb(torch.optim.SGD):
    pass


class PerParameter(torch.optim.SGD):
    per_parameter = True


def test_refusals() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    for optimizer, name in (
        (torch.optim.LBFGS(parameters), r"overlap with LBFGS: .* use ASGD, .*AdamW"),
        (Lamb(parameters), r"overlap with Lamb: .* or set Lamb\.per_parameter = True"),
        (torch.optim.SGD(parameters, differentiable=True), r"overlap with SGD\(differentiable=True\): .* leave it out"),
        ("SGD", r"overlap\(optimizer='SGD'\): give a torch.optim.Optimizer"),
    ):
        given: Any = optimizer
        with pytest.raises(ConfigError, match=name):
            DeferredStep(given)
    accepted = PerParameter(parameters)
    made = DeferredStep(accepted)
    with pytest.raises(ConfigError, match="overlap with PerParameter: it has an overlap already"):
        DeferredStep(accepted)
    with pytest.raises(ConfigError, match=r"PerParameter.step\(closure\): .* call the model and backward\(\) before"):
        accepted.step(lambda: 0.0)
    with pytest.raises(ConfigError, match=r"step\(closure\)"):
        accepted.step(closure=lambda: 0.0)
    made.remove()
    accepted.step(lambda: 0.0)


def test_reads_without_a_word_make_the_step() -> None:
    """And `remove` leaves parameters as they were."""

    def loop(run: Run) -> Iterator[list[Tensor]]:
        for step in range(STEPS):
            run.backward(step)
            run.optimizer.step()
            run.optimizer.zero_grad()
            yield [parameter.detach().clone() for parameter in reversed(run.parameters[step:])]
            if run.deferred is not None:
                run.deferred.settle()

    runs(OPTIMIZERS["AdamW, foreach"], loop)
    left = Run(OPTIMIZERS["SGD"], deferred=True)
    left.backward(0)
    left.optimizer.step()
    assert left.deferred is not None
    assert left.deferred.pending
    left.deferred.remove()
    assert {type(parameter) for parameter in left.parameters} == {nn.Parameter}
