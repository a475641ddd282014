"""Training loops that run twice, plainly and overlapped: both must see the same, bit by bit."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

STEPS = 5

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.01),
    "AdamW, foreach": lambda given: torch.optim.AdamW(given, lr=0.01, foreach=True),
    "Adam, fused": lambda given: torch.optim.Adam(given, lr=0.01, fused=True),
}


class Training(Protocol):
    """One training, plain or overlapped."""

    model: Any
    optimizer: Optimizer
    seen: list[Tensor]
    """Everything to be compared."""

    def loss(self, step: int) -> Tensor: ...

    def see_parameters(self) -> None: ...


Some = TypeVar("Some", bound=Training)


def run_both(loop: Callable[[Some], None], plain: Some, ours: Some) -> Some:
    """Runs the loop in both trainings and compares them; returns ours."""
    for trainer in (plain, ours):
        loop(trainer)
        trainer.see_parameters()
    check_same(plain, ours)
    return ours


def check_same(plain: Training, ours: Training) -> None:
    """Fails unless both saw the same."""
    assert len(plain.seen) == len(ours.seen)
    for number, (one, other) in enumerate(zip(plain.seen, ours.seen, strict=True)):
        assert torch.equal(one, other), number


def one_step(training: Training, step: int) -> None:
    """A step of most jobs."""
    training.optimizer.zero_grad()
    training.loss(step).backward()
    training.optimizer.step()


def usual(training: Training) -> None:
    """The loop of most jobs."""
    scheduler = StepLR(training.optimizer, 1, 0.8)
    for step in range(STEPS):
        one_step(training, step)
        scheduler.step()


def one_step_late(training: Training) -> None:
    """Makes each step with the gradients of the step before: W(t+1) = W(t) - lr g(W(t-1))."""
    parameters = list(training.model.parameters())
    gradients: list[Tensor | None] | None = None
    for step in range(STEPS):
        training.optimizer.zero_grad()
        training.loss(step).backward()
        now = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        if gradients is not None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            training.optimizer.step()
        gradients = now


def check_one_step_late(plain: Training, stale: Training) -> None:
    """Fails unless staleness 1 is the rule of its name."""
    one_step_late(plain)
    for step in range(STEPS):
        one_step(stale, step)
    for trainer in (plain, stale):
        trainer.see_parameters()
    check_same(plain, stale)
