"""`Passes`: the backward passes of a plain module, and the gradients that each of them has made so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Passes:
    """Hooks on the parameters. `begun` and `ended` are called around each backward pass that makes a gradient of one of
    them, and `accumulated` with each parameter once its gradient is there."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        begun: Callable[[], None],
        accumulated: Callable[[Tensor], None],
        ended: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._begun, self._accumulated, self._ended = begun, accumulated, ended
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._enter) for parameter in parameters]
        self._lock = threading.RLock()  # devices have threads of their own
        self._is_open = False
        self._grad: Tensor | None = None
        self.count = 0
        """Passes whose gradients the next step has, the one under way included."""

    def stepped(self) -> None:
        """The optimizer makes its step. A pass that is open has failed."""
        self._is_open, self.count, self._grad = False, 0, None

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, parameter: Tensor) -> None:
        with self._lock:
            if not self._is_open:
                self._is_open = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
                if self._is_fresh(parameter):
                    self.count = 0  # zero_grad() without a step, as a GradScaler leaves it out
                self.count += 1
                self._begun()
            self._accumulated(parameter)

    def _is_fresh(self, parameter: Tensor) -> bool:
        """Whether no other gradient is there, or all are zeros. A parameter alone adds to the gradient that it has."""
        before, self._grad = self._grad, parameter.grad
        if not self.count:
            return True  # the step before was made: nobody has to look
        if len(self._parameters) == 1:
            return parameter.grad is not before
        others = (other.grad for other in self._parameters if other is not parameter)
        return not any(gradient is not None and gradient.any() for gradient in others)

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._ended()
