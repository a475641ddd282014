"""Gradients whose reduction is in flight: `PendingReduction`, and `PendingGradient` in the place of each gradient.

Whatever reads or changes a PendingGradient waits for the reduction first. So code between `backward()` and `step()`
that looks at gradients (clip_grad_norm_, GradScaler.unscale_, a log of norms) stays exact; it only gains no time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def gradient_view(part: Tensor, parameter: Tensor) -> Tensor:
    """The gradient of `parameter` in a flat buffer: `part` has its values, as many as the parameter has.

    It has the parameter's strides if they are dense, so its values lie in the order of memory, as DDP puts them into
    its buckets: those of a transposed matrix column by column. Otherwise they lie row by row.
    """
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return part.view(parameter.shape)
        expected *= size
    return part.as_strided(parameter.size(), parameter.stride())


class PendingReduction:
    """The reduction of some parameters' gradients, in flight.

    `gradients` has each parameter's gradient; the values are valid once `wait` has returned, which raises the error of
    the reduction. None: they are valid already.
    """

    def __init__(self, wait: Callable[[], None] | None, gradients: dict[Tensor, Tensor]) -> None:
        self.gradients = gradients
        self.arrived = wait is None
        """Whether the gradients are valid."""
        self.before_use: Callable[[PendingReduction], None] = PendingReduction.wait
        """It is called before a PendingGradient is read or changed, and waits for the reduction."""
        self._wait = wait

    def place(self) -> None:
        """Puts a PendingGradient in the place of each gradient."""
        for parameter, gradient in self.gradients.items():
            parameter.grad = PendingGradient(gradient, self)

    def stands_for(self, parameter: Tensor) -> bool:
        """Whether the parameter's gradient is a PendingGradient of this reduction."""
        return isinstance(parameter.grad, PendingGradient) and parameter.grad.reduction is self

    def wait(self) -> None:
        """Waits for the gradients, and puts them in the place of the PendingGradients that are still there."""
        if self._wait is not None:
            self._wait()
            self._wait, self.arrived = None, True
        for parameter, gradient in self.gradients.items():
            if self.stands_for(parameter):
                parameter.grad = gradient


class PendingGradient(torch.Tensor):
    """A gradient in flight. It has the type and shape of `gradient`; every operation waits, and then takes that."""

    reduction: PendingReduction
    _gradient: Tensor

    @staticmethod
    def __new__(cls, gradient: Tensor, reduction: PendingReduction) -> PendingGradient:
        made: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            gradient.size(),
            strides=gradient.stride(),
            dtype=gradient.dtype,
            layout=gradient.layout,
            device=gradient.device,
        )
        made.reduction, made._gradient = reduction, gradient
        return made

    def __init__(self, gradient: Tensor, reduction: PendingReduction) -> None:
        pass

    def arrived(self) -> Tensor:
        """The gradient itself; waits for it."""
        self.reduction.before_use(self.reduction)
        return self._gradient

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as the documentation of torch has it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(PendingGradient, PendingGradient.arrived, (args, kwargs or {}))
        return func(*args, **kwargs)

    # These read memory without an operation of the dispatcher.

    def data_ptr(self) -> int:
        return self.arrived().data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        return self.arrived().numpy(force=force)

    def tolist(self) -> Any:
        return self.arrived().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.arrived())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.arrived(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.arrived().__reduce_ex__(protocol)
