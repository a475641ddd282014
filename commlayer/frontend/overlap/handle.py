"""`Overlap`: the hooks that DDP and FSDP2 have in common when gradients travel during the next forward pass.

In front of each module's forward the steps of its parameters are made; when the forward pass ends, all others are. What
takes a parameter in another way, as `F.embedding(words, self.embedding.weight)`, finds it guarded, and makes its step
(scheduler/guard.py). Code that no function of Python shows, as that of torch.func, is found in the graph of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BroadcastOptions
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...config import Policy
from ...dynamo import untraced
from ...errors import ConfigError
from ...scheduler.deferred import DeferredStep
from ...scheduler.guard import tensors_in
from ...scheduler.order import FirstUse, NextUse
from ..group.backend import CommProcessGroup
from ..work.context import in_order


@untraced
class Overlap:
    """What `overlap` returns. `net` is the model itself, within `model`'s wrapper."""

    def __init__(self, model: nn.Module, net: nn.Module, optimizer: Optimizer, staleness: int) -> None:
        self.by_next_use = not staleness
        """Whether gradients have classes by next use. False: all have the policy's class and travel first in, first
        out. With staleness 1, gradients of the step before are still in flight, and are needed earlier."""
        self._model, self._net = model, net
        self._order = NextUse(net)
        self._needs = {module: list(module.parameters(recurse=False)) for module in net.modules()}
        _check_owned(self._order, optimizer)
        self._deferred = DeferredStep(optimizer, staleness)
        self._is_agreed = False
        self._watch = FirstUse(self._order.parameters, self._order.use)
        self._is_watching = False
        self.is_removed = False
        """Whether `remove` has been called."""
        checkpoints = hooks_of_states(model.modules(), optimizer, self.finish, self._load)
        self._hooks = [*self._hooks_of_modules(), *checkpoints]

    def finish(self) -> None:
        """Waits for all gradients, and makes all steps that are left; for code that then reads parameters or `state`.

        Raises the error of an operation: PeerLostError, OperationTimeoutError and the others.
        """
        self._deferred.drain()

    def remove(self) -> None:
        """Ends the overlap after `finish`; from then on gradients are averaged within `backward()`.

        After an error of `finish`, the steps that are left are dropped: ranks may differ, so restore a checkpoint.
        """
        try:
            self._deferred.drain()
        finally:
            self.is_removed = True
            self._deferred.remove()
            for hook in self._hooks:
                hook.remove()

    def _load(self) -> None:
        """A checkpoint is about to be loaded."""
        self.finish()
        self._deferred.forget()

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

        def end(module: nn.Module, _: Any, output: Any) -> None:
            if module is self._net:
                self._end(output)

        hooks = [module.register_forward_pre_hook(enter, prepend=True) for module in self._users()]
        hooks.append(self._net.register_forward_pre_hook(begin, prepend=True))
        hooks.append(self._net.register_forward_hook(leave, always_call=True))
        hooks.append(self._net.register_forward_hook(end))
        return hooks

    def _users(self) -> list[nn.Module]:
        """The modules before whose forward steps are made."""
        return [module for module, needs in self._needs.items() if needs or module is self._net]

    def _begin(self) -> None:
        """A forward pass of the model starts."""
        if not torch.is_grad_enabled():
            self.finish()
        elif not self._is_watching and not self._order.is_learned:
            self._order.begin()
            self._watch.__enter__()  # type: ignore[no-untyped-call]
            self._is_watching = True

    def _enter(self, module: nn.Module) -> None:
        """The forward of a module starts."""
        self._deferred.use(self._needs.get(module, ()))  # a copy of the model has the hooks, too

    def _leave(self) -> None:
        """The forward pass has ended, well or not."""
        if self._is_watching:
            self._is_watching = False
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _end(self, output: Any) -> None:
        """The forward pass has ended well. Raises ConfigError if it used a parameter without its step."""
        if torch.is_grad_enabled() and not self._order.is_learned:
            self._order.end()
        for parameter in _leaves_of(output) if self._deferred.pending else ():
            if parameter in self._deferred.pending:
                self._refuse(parameter)
        self._deferred.settle()

    def _refuse(self, used: Tensor) -> None:
        name = next((name for name, parameter in self._net.named_parameters() if parameter is used), "?")
        raise ConfigError(
            f"rank {dist.get_rank()}: overlap({type(self._model).__name__}): the forward pass used the parameter "
            f"{name!r} as it was before the step, in code that Python does not show (torch.func, a C++ extension); "
            f"call handle.finish() before the model, or the module that has the parameter"
        )

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _class_of(self, parameters: list[Tensor], policy: Policy) -> int:
        """The class of these parameters' gradients."""
        return self._order.class_of(parameters, policy.priority) if self.by_next_use else policy.priority

    def _in_order(self, parameters: list[Tensor]) -> AbstractContextManager[None]:
        """A context in which the reduction of these parameters' gradients starts: within a class by next use."""
        return in_order(self._order.place_of(parameters) if self.by_next_use else 0)

    def _agree(self, group: CommProcessGroup) -> None:
        """The ranks take the order of one in the first backward pass, as classes must be the same on all."""
        if self._is_agreed or not self._order.is_learned:
            return
        places = torch.tensor(self._order.places(), dtype=torch.int64, device="cpu")
        options = BroadcastOptions()
        options.rootRank = 0
        group.broadcast([places], options).wait()
        self._order.adopt(places.tolist())
        self._is_agreed = True


def _leaves_of(output: Any) -> Iterator[Tensor]:
    """The parameters in the graph of what a model returns."""
    nodes = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def hooks_of_states(
    modules: Iterable[nn.Module], optimizer: Optimizer, save: Callable[[], None], load: Callable[[], None]
) -> list[RemovableHandle]:
    """Hooks that call `save` before a `state_dict`, and `load` before a `load_state_dict`."""

    def saves(*_: Any) -> None:
        save()

    def loads(*_: Any) -> None:
        load()

    hooks = [optimizer.register_state_dict_pre_hook(saves), optimizer.register_load_state_dict_pre_hook(loads)]
    for module in modules:
        hooks.append(module.register_state_dict_pre_hook(saves))
        hooks.append(module.register_load_state_dict_pre_hook(loads))
    return hooks


def check_modules(model: nn.Module) -> None:
    """Raises ConfigError for modules and parameters that make their steps, or run, on their own."""
    who = f"overlap({type(model).__name__})"
    check_own_steps(model, who)
    if any(is_compiled(module) for module in model.modules()):
        raise ConfigError(
            f"{who}: a part of the model is compiled, and may leave out hooks that come later; compile it after overlap"
        )


def check_own_steps(model: nn.Module, who: str) -> None:
    """Raises ConfigError for parameters that are stepped in the backward pass, and for TorchScript."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ConfigError(f"{who}: a part of it is TorchScript, which runs no hooks of modules; leave torch.jit out")
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise ConfigError(f"{who}: its optimizer runs in the backward pass; leave _apply_optimizer_in_backward out")


def is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _check_owned(order: NextUse, optimizer: Optimizer) -> None:
    """Raises ConfigError unless the optimizer has a parameter of the model."""
    mine = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if not any(parameter in order.parameters for parameter in mine):
        raise ConfigError(
            f"overlap with {type(optimizer).__name__}: it has no parameter of the model; give it model.parameters()"
        )
