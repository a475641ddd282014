"""`DeferredStep`: the step of an optimizer, made for each reduction when its gradients are needed, not in `step()`.

`step()` notes the hyperparameters and goes on. The step of some parameters is made before their next use, by the same
optimizer, with only these parameters and the noted hyperparameters in its groups. So a scheduler may change the
learning rate, and `zero_grad` may clear gradients, before that. Whoever runs the model calls `use` before a module
runs; what takes a parameter in another way finds it guarded (guard.py), and makes its step.

With staleness 1, `step()` number t makes the step with the gradients of the backward pass before the last one:
W(t+1) = W(t) - lr(t) g(W(t-1)), the rule of PipeDream-2BW (Narayanan et al., ICML 2021). There is no step number 0.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..dynamo import uncompiled, untraced
from ..errors import ConfigError
from .gradient import PendingReduction
from .guard import guard, others_hold, unguard

log = logging.getLogger("commlayer")

_NAMES = [
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
    "Adafactor",
    "Muon",
]
PER_PARAMETER = frozenset(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""Optimizers whose step for one parameter reads nothing of the others, and which keep no state in their groups."""


def check_per_parameter(optimizer: object, who: str = "overlap") -> None:
    """Raises ConfigError unless the step can be made for some parameters at a time."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{who}(optimizer={optimizer!r}): give a torch.optim.Optimizer, as AdamW")
    name = type(optimizer).__name__
    if type(optimizer) not in PER_PARAMETER and not getattr(type(optimizer), "per_parameter", False):
        raise ConfigError(
            f"{who} with {name}: its step may need all gradients at once, and a deferred step is made for some "
            f"parameters at a time; use {', '.join(sorted(kind.__name__ for kind in PER_PARAMETER))}, or set "
            f"{name}.per_parameter = True if its step for one parameter reads nothing of the others"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(f"{who} with {name}(differentiable=True): a deferred step has no gradient; leave it out")


@dataclasses.dataclass(eq=False)
class Claim:
    """A step to make when a reduction has arrived."""

    reduction: PendingReduction
    parameters: list[list[Tensor]]
    """One list per group of the optimizer."""
    hyperparameters: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """One mapping per group, as of `step()`."""


@untraced
class DeferredStep:
    """Makes the steps of `optimizer` for the reductions that `add` brings. Raises ConfigError, see the check above.

    Whoever runs the model calls `use` before parameters are used, and `settle` before the next backward pass.
    """

    def __init__(self, optimizer: Optimizer, staleness: int = 0, views_are_watched: bool = False) -> None:
        """`views_are_watched`: the caller also calls `use` before a view or `.data` of a parameter is read."""
        check_per_parameter(optimizer)
        if is_deferred(optimizer):
            raise ConfigError(f"overlap with {type(optimizer).__name__}: it has an overlap already; use one per model")
        self.optimizer = optimizer
        self.staleness = staleness
        self._views_are_watched = views_are_watched
        self._open: list[PendingReduction] = []
        """Reductions since the last `step()`."""
        self._claims: dict[Tensor, Claim] = {}
        """Steps to make, by parameter."""
        self._held: list[Claim] = []
        """Gradients that wait for the next `step()`, with staleness 1."""
        self._hidden: dict[Tensor, Tensor | None] = {}
        """Gradients of claims, during the optimizer's own step for all others."""
        self._shared: set[Tensor] = set()
        """Parameters of the last `step()` whose memory others hold: they may be read unnoticed, so nothing waits."""
        self._is_applying = False
        self._told: set[str] = set()
        hooks = optimizer.register_step_pre_hook(self._before_step), optimizer.register_step_post_hook(self._after_step)
        self._hooks = hooks

    @property
    def pending(self) -> Collection[Tensor]:
        """The parameters with a step to make."""
        return self._claims.keys()

    def add(self, reduction: PendingReduction) -> None:
        """Takes a reduction that a backward pass has started, and replaces its gradients by PendingGradients."""
        reduction.before_use = self._read
        reduction.place()
        self._open.append(reduction)

    def use(self, parameters: Iterable[Tensor]) -> None:
        """Makes the steps of these parameters before they are used. Raises the error of a reduction."""
        for parameter in parameters if self._claims and not self._is_applying else ():
            claim = self._claims.get(parameter)
            if claim is not None:
                self._apply(claim)

    def needs(self, reduction: PendingReduction) -> bool:
        """Whether a step is to be made with the result, now or after the next `step()`."""
        return any(claim.reduction is reduction for claim in [*self._claims.values(), *self._held])

    def finish(self) -> None:
        """Makes all steps. Raises the error of a reduction; its step then stays to be made."""
        while self._claims:
            self._apply(next(iter(self._claims.values())))

    def settle(self) -> None:
        """Makes all steps, and waits for reductions that no `step()` has taken. Raises the error of a reduction."""
        self.finish()
        for reduction in self._open:
            reduction.wait()
        self._open.clear()

    def drain(self) -> None:
        """Does what `settle` does, and also waits for the gradients that staleness 1 keeps for the next `step()`."""
        self.settle()
        for claim in self._held:
            claim.reduction.wait()

    def forget(self) -> None:
        """Drops the gradients that staleness 1 keeps for the next `step()`: they belong to other parameters."""
        self._held.clear()

    def remove(self) -> None:
        """Drops all that is left to do, and leaves the optimizer as it was."""
        for hook in self._hooks:
            hook.remove()
        self._open.clear()
        for parameter in self._claims:
            unguard(parameter)
        self._claims.clear()
        self.forget()

    def _read(self, reduction: PendingReduction) -> None:
        """A gradient is read or changed: the step that should have come before it is made first."""
        claim = next((claimed for claimed in self._claims.values() if claimed.reduction is reduction), None)
        if claim is not None:
            self._apply(claim)
            return
        if any(pending is reduction for pending in self._open):
            self._tell("gradients are read before step(), as by clip_grad_norm_ or GradScaler")
        reduction.wait()

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            log.warning("overlap: %s: the step waits there for the gradients, and results stay exact", reason)
        self._told.add(reason)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Claims gradients in flight in `step()`, before the optimizer's own step, and hides them from it."""
        if self._is_applying:
            return
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise ConfigError(
                f"overlap with {type(optimizer).__name__}.step(closure): the closure would need all steps at once; "
                f"call the model and backward() before step()"
            )
        if self.staleness and getattr(optimizer, "found_inf", None) is not None:
            raise ConfigError(
                f"overlap(staleness=1) with {type(optimizer).__name__} and a GradScaler: a fused optimizer takes the "
                f"scale and the overflow of this step, and its gradients are those of the step before; use fused=False"
            )
        self.finish()
        self._hidden.clear()  # not empty after a step that failed
        if self._has_other_hooks():
            self._tell("the optimizer has other step hooks, which may read parameters")
            for reduction in self._open:
                reduction.wait()
        if not self._views_are_watched:
            self._wait_for_shared()
        now = [_hyperparameters(group) for group in optimizer.param_groups]
        claims = self._claim()
        self._open = [
            pending for pending in self._open if any(pending.stands_for(parameter) for parameter in pending.gradients)
        ]
        if self.staleness:
            claims, self._held = self._held, claims
            self._hidden.clear()
        for claim in claims:
            claim.hyperparameters = now
            self._claims.update({parameter: claim for group in claim.parameters for parameter in group})

    def _wait_for_shared(self) -> None:
        """Waits for the gradients of parameters whose memory others hold, and leaves them to the optimizer's own step.

        With staleness 1 their steps are made after it.
        """
        own = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        reductions = [*self._open, *(step.reduction for step in self._held)]
        arriving = {parameter for reduction in reductions for parameter in reduction.gradients}
        self._shared = others_hold([parameter for parameter in own if parameter in arriving], own)
        if self._shared:
            first = next(number for number, parameter in enumerate(own) if parameter in self._shared)
            self._tell(
                f"the memory of {len(self._shared)} parameters is held by another tensor, as a view or .data, which "
                f"reads it unnoticed: the first is parameter {first} of the optimizer, {tuple(own[first].shape)}"
            )
        for reduction in self._open:
            if not self._shared.isdisjoint(reduction.gradients):
                reduction.wait()

    def _claim(self) -> list[Claim]:
        """Takes the gradients of the open reductions from the parameters of the optimizer."""
        source = self._sources()
        groups = self.optimizer.param_groups
        claims: dict[PendingReduction, Claim] = {}
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                reduction = source.get(parameter)
                if reduction is not None:
                    claim = claims.setdefault(reduction, Claim(reduction, [[] for _ in groups]))
                    claim.parameters[number].append(parameter)
                    self._hidden[parameter], parameter.grad = parameter.grad, None
        return list(claims.values())

    def _sources(self) -> dict[Tensor, PendingReduction]:
        """The reduction of each gradient to be claimed. All others are those of the optimizer's own step.

        With staleness 1, gradients that have arrived are claimed, too, and those that the caller has replaced.
        """
        source = {}
        there = PendingReduction(None, {})
        for reduction in self._open:
            for parameter, gradient in reduction.gradients.items():
                # A gradient that has arrived keeps its reduction: `needs` must know that its memory is in use.
                if reduction.stands_for(parameter) or (self.staleness and parameter.grad is gradient):
                    source[parameter] = reduction
                elif self.staleness and parameter.grad is not None:
                    source[parameter], there.gradients[parameter] = there, parameter.grad
        return source

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Puts hidden gradients back: without a `zero_grad` they stay."""
        if not self._is_applying:
            for parameter, gradient in self._hidden.items():
                parameter.grad = gradient
            self._hidden.clear()
            self.use(self._shared)
            for parameter in self._claims:
                guard(parameter, self._used)

    def _used(self, parameter: Tensor) -> None:
        """A guarded parameter is about to be read or changed."""
        self.use([parameter])

    def _has_other_hooks(self) -> bool:
        of_all = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
        of_all = [hook for hook in of_all if not getattr(hook, "reads_nothing", False)]  # such is that of a trial
        return len(_hooks_of(self.optimizer)) + len(of_all) > len(self._hooks)

    def _apply(self, claim: Claim) -> None:
        """Makes one step: with the noted hyperparameters, and for the parameters of the claim only."""
        self._is_applying = True  # a watch over parameters sees their gradients change
        try:
            claim.reduction.wait()
            for group in claim.parameters:
                for parameter in group:
                    del self._claims[parameter]
                    unguard(parameter)
            self._step(claim)
        finally:
            self._is_applying = False

    def _step(self, claim: Claim) -> None:
        optimizer = self.optimizer
        pairs = zip(claim.hyperparameters, claim.parameters, strict=False)  # groups may have been added since
        groups = [{**noted, "params": parameters} for noted, parameters in pairs if parameters]
        parameters = [parameter for group in groups for parameter in group["params"]]
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = claim.reduction.gradients[parameter]
        all_groups, optimizer.param_groups = optimizer.param_groups, groups
        _in_parts.add(optimizer)
        try:
            # The caller's forward pass may run under autocast, in inference mode, or within torch.func.
            with (
                torch.inference_mode(False),
                torch.autocast(parameters[0].device.type, enabled=False),
                _outside_of_transforms(),
                uncompiled(),
            ):
                type(optimizer).step(optimizer)
        finally:
            _in_parts.discard(optimizer)
            optimizer.param_groups = all_groups
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient


def _outside_of_transforms() -> AbstractContextManager[Any]:
    """A context outside of `torch.func.grad` and `vmap`, which refuse changes of tensors from without."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # takes long to import

    return temporarily_clear_interpreter_stack()


_in_parts: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose step is being made for some parameters."""


def is_deferred(optimizer: Optimizer) -> bool:
    """Whether a DeferredStep makes its steps."""
    return any(isinstance(getattr(hook, "__self__", None), DeferredStep) for hook in _hooks_of(optimizer))


def check_whole(optimizer: Optimizer, parameters: Iterable[Tensor], who: str) -> None:
    """Raises ConfigError unless `step()` changes all parameters of the optimizer, at once and on this rank."""
    is_own = any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters)
    if is_deferred(optimizer) or is_own or type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ConfigError(
            f"{who}: {type(optimizer).__name__}: its steps are not made in step() as a whole: leave "
            f"commlayer.overlap, _apply_optimizer_in_backward and ZeroRedundancyOptimizer out"
        )


def is_in_parts(optimizer: Optimizer) -> bool:
    """Whether the step that a hook sees is made for some parameters only, after the `step()` of the caller."""
    return optimizer in _in_parts


def _hooks_of(optimizer: Optimizer) -> list[Any]:
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """The values of now: a scheduler may also change a tensor in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


@untraced
class AwaitedStep:
    """Waits in `step()` for the reductions that `add` brings. It has the interface of `DeferredStep`."""

    staleness = 0

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._open: list[PendingReduction] = []
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def add(self, reduction: PendingReduction) -> None:
        """Takes a reduction that a backward pass has started, and replaces its gradients by PendingGradients."""
        reduction.place()
        self._open.append(reduction)

    def use(self, parameters: Iterable[Tensor]) -> None:
        """These parameters are about to be used. There is nothing to do."""

    def needs(self, reduction: PendingReduction) -> bool:  # noqa: ARG002
        """Whether a step is to be made with the result. `step()` has made it."""
        return False

    def drain(self) -> None:
        """Waits for all reductions. Raises the error of one."""
        while self._open:
            self._open[0].wait()
            self._open.pop(0)

    def forget(self) -> None:
        """Nothing is kept."""

    def remove(self) -> None:
        """Drops the reductions that are left, and leaves the optimizer as it was."""
        self._hook.remove()
        self._open.clear()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        self.drain()
