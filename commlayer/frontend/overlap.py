"""`overlap`: gradients of a DistributedDataParallel model travel during the next forward pass.

    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    handle = commlayer.overlap(model, optimizer)
    ...                                            # the training loop is unchanged

Three things make this work, and keep every result as it was:

- The communication hook starts the reduction of a bucket and returns at once, so `backward()` ends before the network
  does. The bucket that the next forward pass needs first has the most urgent class (scheduler/order.py).
- `optimizer.step()` makes no step for gradients in flight (scheduler/deferred.py).
- Before a module's forward, a hook waits for the buckets of this module's parameters and makes their steps. All else is
  done when the forward pass ends, because the backward pass then fills the buckets again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BroadcastOptions
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..compress.codec import PAIRS
from ..compress.optimizer import check_optimizer
from ..config import Policy
from ..errors import ConfigError
from ..scheduler.deferred import DeferredStep, check_per_parameter
from ..scheduler.gradient import PendingReduction
from ..scheduler.order import FirstUse, NextUse
from .commit import Commit
from .ddp import check_dense, reduce_bucket
from .dynamo import untraced
from .gradient import Reduction
from .hook_state import HookState

STATELESS = ["none", *(name for name, pair in PAIRS.items() if pair is not None and not pair.keeps_errors)]
"""Codecs that keep nothing from step to step."""


def overlap(
    model: nn.Module,
    optimizer: Optimizer,
    policy: Policy | None = None,
    *,
    staleness: int = 0,
    state: HookState | None = None,
) -> Overlap:
    """Lets the gradients of `model` travel during its next forward pass. All ranks call it, before training.

    `model` is a DistributedDataParallel with gradient_as_bucket_view=True. `state` is a HookState of the caller instead
    of `policy`: restored, or with a tolerance. The training loop stays as it is, and with `staleness` 0 so do its
    results, bit by bit. `staleness=1` makes each step with the gradients of the step before, W(t+1) = W(t) - lr
    g(W(t-1)): no forward pass waits for the network, but training is another one.

    Code that reads parameters between `step()` and the next forward pass, as a moving average does, must call
    `finish()` of the handle first; `state_dict()` and evaluation do so by themselves.

    Raises ConfigError for models, optimizers and policies with which results would change.
    """
    ddp = _checked_model(model)
    check_per_parameter(optimizer)
    if type(staleness) is not int or staleness not in (0, 1):
        raise ConfigError(f"overlap(staleness={staleness!r}): use 0 (exact) or 1")
    if state is not None and policy is not None:
        raise ConfigError("overlap(policy=..., state=...): the state has a policy; give one of both")
    state = state or HookState(policy, ddp.process_group, optimizer=optimizer)
    state.optimizer = state.optimizer or optimizer
    check_optimizer(state.policy, state.optimizer)
    if staleness:
        _check_stateless(state)
    return Overlap(ddp, optimizer, state, staleness)


@dataclasses.dataclass(eq=False)
class Started:
    """A bucket whose reduction a backward pass has started."""

    parameters: list[Tensor]
    first: int
    """Element of the bucket's storage where its buffer begins."""
    memory: Tensor
    """The buffer, or a copy that the next backward pass does not overwrite."""
    averaged: Future[Tensor]
    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error

    def gradients(self) -> dict[Tensor, Tensor]:
        """After the backward pass: the gradients in `memory`. DDP has made them views of its bucket."""
        found = {}
        for parameter in self.parameters:
            view = parameter.grad
            if view is not None:
                offset = self.memory.storage_offset() + view.storage_offset() - self.first
                found[parameter] = self.memory.as_strided(view.size(), view.stride(), int(offset))
        return found

    def wait(self) -> None:
        """Waits until the averages are in `memory`. Raises the error of the operation, with its own type."""
        try:
            averaged = self.averaged.wait()
        except RuntimeError as error:
            raise self.error or error from None
        if averaged.data_ptr() != self.memory.data_ptr():  # that of a codec is reused by the next step
            self.memory.copy_(averaged)


@untraced
class Overlap:
    """What `overlap` returns."""

    def __init__(self, model: DistributedDataParallel, optimizer: Optimizer, state: HookState, staleness: int) -> None:
        self.state = state
        """Counters, checkpoint and `loss_scale` of the reductions."""
        self.by_next_use = True
        """Whether buckets have classes by next use. False: all have the policy's class, as on a network that knows
        none (for measurements)."""
        net = model.module
        self._model, self._net = model, net
        self._order = NextUse(net)
        _check_owned(self._order, optimizer)
        state.group()  # a collective: made here, where all ranks are
        self._deferred = DeferredStep(optimizer, staleness)
        self._started: list[Started] = []
        self._memories: tuple[dict[Any, Tensor], ...] = ({}, {})
        self._is_agreed = False
        self._watch = FirstUse(self._order.parameters, self._use)
        self._is_watching = False
        self._is_removed = False
        model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))
        self._hooks = [*self._hooks_of_modules(), *self._hooks_of_states(optimizer)]

    def finish(self) -> None:
        """Waits for all gradients, and makes all steps that are left; for code that then reads parameters or `state`.

        Raises the error of an operation: PeerLostError, OperationTimeoutError and the others.
        """
        self._deferred.settle()

    def remove(self) -> None:
        """Ends the overlap after `finish`; from then on the hook averages gradients as `allreduce_hook` does.

        After an error of `finish`, the steps that are left are dropped: ranks may differ, so restore a checkpoint.
        """
        try:
            self._deferred.settle()
        finally:
            self._is_removed = True
            self._deferred.remove()
            for hook in self._hooks:
                hook.remove()

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _hooks_of_modules(self) -> list[RemovableHandle]:
        # Functions, and not methods: `copy.deepcopy` of the model then leaves the overlap uncopied.
        def enter(module: nn.Module, _: Any) -> None:
            self._enter(module)

        def begin(module: nn.Module, _: Any) -> None:
            if module is self._net:
                self._begin()

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if module is self._net:
                self._leave()

        def end(module: nn.Module, _: Any, __: Any) -> None:
            if module is self._net:
                self._end()

        hooks = [
            module.register_forward_pre_hook(enter, prepend=True)
            for module, needs in self._order.needs.items()
            if needs or module is self._net
        ]
        hooks.append(self._net.register_forward_pre_hook(begin, prepend=True))
        hooks.append(self._net.register_forward_hook(leave, always_call=True))
        hooks.append(self._net.register_forward_hook(end))
        return hooks

    def _begin(self) -> None:
        """A forward pass of the model starts."""
        if not torch.is_grad_enabled():
            self.finish()
        elif not self._is_watching and (not self._order.is_learned or self._order.has_borrowed):
            if not self._order.is_learned:
                self._order.begin()
            self._watch.__enter__()  # type: ignore[no-untyped-call]
            self._is_watching = True

    def _enter(self, module: nn.Module) -> None:
        """The forward of a module starts."""
        needs = self._order.needs.get(module)
        if needs is None:
            return  # of a copy of the model
        if self._is_watching and not self._order.is_learned:
            self._order.enter(module)
        self._deferred.use(needs)

    def _use(self, parameter: Tensor) -> None:
        """An operation takes a parameter."""
        if not self._order.is_learned:
            self._order.use(parameter)
        self._deferred.use([parameter])

    def _leave(self) -> None:
        """The forward pass has ended, well or not."""
        if self._is_watching:
            self._is_watching = False
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        """The forward pass has ended well."""
        if torch.is_grad_enabled() and not self._order.is_learned:
            self._order.end()
        self._deferred.settle()

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The communication hook."""
        if self._model._join_config.enable:
            raise ConfigError("overlap within model.join(): ranks without inputs make no steps; leave join() out")
        check_dense(bucket)
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if bucket.index() == 0:
            self._started.clear()  # not empty after a backward pass that failed
            self._agree()
        memory = buffer.clone() if self._deferred.staleness and not self._is_removed else buffer
        priority = self.state.policy.priority
        if self.by_next_use:
            priority = self._order.class_of(parameters, priority)
        started = Started(parameters, int(buffer.storage_offset()), memory, Future())

        def reduction() -> Reduction:
            shared = dataclasses.replace(self.state.reduction(), failed=started.fail)
            if self.state.loss_scale == 1 and not self._is_removed:  # no GradScaler: buckets make steps of their own
                shared.commit = Commit(alone=True)
            if self._deferred.staleness:  # that of the last step is still in use
                shared.memory = self._memories[self.state.steps % 2]
            return shared

        started.averaged = reduce_bucket(memory, bucket, self.state, reduction, priority)
        if self._is_removed:
            return started.averaged
        self._started.append(started)
        if bucket.is_last():
            # DDP queues its own callback after this hook, and demands plain gradients there. Ours is to follow it.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._end_backward))
        done: Future[Tensor] = Future(devices=[] if buffer.is_cpu else [buffer.device])
        done.set_result(buffer)
        return done

    def _agree(self) -> None:
        """In the first step: all ranks take the order of the first one, as classes must be the same on all."""
        if self._is_agreed or not self._order.is_learned:
            return
        places = torch.tensor(self._order.places())
        options = BroadcastOptions()
        options.rootRank = 0
        self.state.group().broadcast([places], options).wait()
        self._order.adopt(places.tolist())
        self._is_agreed = True

    def _end_backward(self) -> None:
        """The backward pass has ended."""
        started, self._started = self._started, []
        for each in started:
            self._deferred.add(PendingReduction(each.wait, each.gradients()))

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _hooks_of_states(self, optimizer: Optimizer) -> list[RemovableHandle]:
        def save(*_: Any) -> None:
            self.finish()

        def load(*_: Any) -> None:
            self.finish()
            self._deferred.forget()

        hooks = [
            optimizer.register_state_dict_pre_hook(save),
            optimizer.register_load_state_dict_pre_hook(load),
        ]
        for module in self._model.modules():
            hooks.append(module.register_state_dict_pre_hook(save))
            hooks.append(module.register_load_state_dict_pre_hook(load))
        return hooks


def _checked_model(model: nn.Module) -> DistributedDataParallel:
    """The model, if its gradients can travel during the next forward pass. Raises ConfigError otherwise."""
    who = f"overlap({type(model).__name__})"
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"{who}: give a DistributedDataParallel with gradient_as_bucket_view=True")
    reason = "DDP would copy gradients before they are reduced; set it to True"
    unused = "only DDP knows which gradients no rank has, and their parameters must not be stepped; set it to False"
    has_step = any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters())
    faults = (
        (not model.gradient_as_bucket_view, f"gradient_as_bucket_view=False: {reason}"),
        (model.find_unused_parameters, f"find_unused_parameters=True: {unused}"),
        (model.mixed_precision is not None, "DDP's mixed_precision has hooks of its own; use torch.autocast"),
        (bool(model._comm_hooks), "the model has a communication hook already, and DDP takes one; leave it out"),
        (has_step, "its optimizer runs in the backward pass; leave _apply_optimizer_in_backward out"),
        (
            any(_is_compiled(module) for module in model.modules()),
            "a part of the model is compiled, and hooks of its modules do not run; leave torch.compile out",
        ),
    )
    for is_so, fault in faults:
        if is_so:
            raise ConfigError(f"{who}: {fault}")
    return model


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _check_owned(order: NextUse, optimizer: Optimizer) -> None:
    """Raises ConfigError unless the optimizer has a parameter of the model."""
    mine = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if not any(parameter in order.parameters for parameter in mine):
        raise ConfigError(
            f"overlap with {type(optimizer).__name__}: it has no parameter of the model; give it model.parameters()"
        )


def _check_stateless(state: HookState) -> None:
    """Raises ConfigError if something of one step must be known in the next: with staleness 1 it is in flight then."""
    policy = state.policy
    if policy.codec not in STATELESS or policy.loss_bound or state.tolerance is not None:
        given = f"Policy(codec={policy.codec!r}, loss_bound={policy.loss_bound})"
        raise ConfigError(
            f"overlap(staleness=1) with {given if state.tolerance is None else 'a tolerance'}: residuals of a step are "
            f"not known when the next one starts; use staleness=0, or loss_bound=0 and one of {', '.join(STATELESS)}"
        )
