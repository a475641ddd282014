"""`Segment`: the gradients of some parameters in one buffer, which is reduced as a whole.

The gradients are views of the buffer, so backward passes accumulate in it and nothing is copied. A buffer serves one
reduction at a time: the next backward passes fill it again when its reduction is no longer needed, and another one if
it still is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from .gradient import PendingGradient, PendingReduction, gradient_view

Start = Callable[[Tensor, int], Callable[[], None]]
"""Starts the reduction of a buffer in a class; returns the function that waits for it."""


class _Buffer:
    """Memory for one gradient of each parameter."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        first = parameters[0]
        self.flat = torch.zeros(
            sum(parameter.numel() for parameter in parameters), dtype=first.dtype, device=first.device
        )
        parts = self.flat.split([parameter.numel() for parameter in parameters])
        self.views = [gradient_view(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]
        self.reduction: PendingReduction | None = None
        """The last one."""


class Segment:
    """The gradients of `parameters`, which have one dtype and device. `start` reduces them.

    `passes`: backward passes of a step, each with at most one gradient of a parameter.
    """

    def __init__(self, parameters: Sequence[Tensor], start: Start, passes: int) -> None:
        self.parameters = list(parameters)
        self._start = start
        self._passes = passes
        self._buffers = [_Buffer(self.parameters)]
        self._buffer = self._buffers[0]
        self.is_armed = False
        """Whether backward passes fill the buffer: since `arm`, until `launch`."""
        self._counts: Counter[Tensor] = Counter()
        """Gradients of this step, by parameter."""
        self._left = len(self.parameters)
        """Parameters with fewer gradients than backward passes."""
        self._is_regular = False
        """Whether some gradients came before the last `launch`, and never two in one backward pass."""

    def arm(self, is_needed: Callable[[PendingReduction], bool]) -> None:
        """Makes the gradients views of a buffer before a backward pass; values that are there stay.

        `is_needed` tells whether the result of a reduction is still to be used. Raises the error of a reduction.
        """
        if self.is_armed:
            return
        for parameter in self.parameters:
            if isinstance(parameter.grad, PendingGradient):
                parameter.grad.reduction.wait()
        views = zip(self.parameters, self._buffer.views, strict=True)
        if not any(parameter.grad is view for parameter, view in views):
            self._buffer = self._free_buffer(is_needed)
        self.is_armed = True
        self._gather()

    def restart(self) -> None:
        """A step starts: drops the counts of one that failed before its `launch`."""
        self._counts.clear()
        self._left = len(self.parameters)

    def count(self, parameter: Tensor) -> bool:
        """A backward pass has accumulated a gradient. Whether all of this step have come: one for each parameter and
        backward pass.

        Raises ConfigError if a gradient comes after the reduction has started.
        """
        if not self.is_armed:
            raise ConfigError(
                f"a gradient of shape {tuple(parameter.shape)} was accumulated after its reduction had started: a "
                f"backward pass accumulates it several times, and those of the step before did not; checkpoint with "
                f"use_reentrant=False"
            )
        self._counts[parameter] += 1
        if self._counts[parameter] == self._passes:
            self._left -= 1
        return self._left == 0 and self._is_regular

    def launch(self, factor: int, priority: int) -> PendingReduction:
        """Divides the gradients by `factor` and starts their reduction. The segment must be armed."""
        self._gather()
        buffer, self.is_armed = self._buffer, False
        self._is_regular = 0 < max(self._counts.values(), default=0) <= self._passes
        self.restart()
        if factor != 1:
            buffer.flat.div_(factor)
        wait = self._start(buffer.flat, priority)
        buffer.reduction = PendingReduction(wait, dict(zip(self.parameters, buffer.views, strict=True)))
        return buffer.reduction

    def _gather(self) -> None:
        """Makes every gradient a view of the buffer: absent ones are zeros, others are copied."""
        buffer = self._buffer
        if all(parameter.grad is None for parameter in self.parameters):
            buffer.flat.zero_()
            for parameter, view in zip(self.parameters, buffer.views, strict=True):
                parameter.grad = view
            return
        for parameter, view in zip(self.parameters, buffer.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad.detach())
            parameter.grad = view

    def _free_buffer(self, is_needed: Callable[[PendingReduction], bool]) -> _Buffer:
        """A buffer whose last result has been used, or a new one."""
        for buffer in self._buffers:
            if buffer.reduction is None:
                return buffer
            if not is_needed(buffer.reduction):
                buffer.reduction.wait()  # nobody may have: a step() was left out
                return buffer
        self._buffers.append(_Buffer(self.parameters))
        return self._buffers[-1]
