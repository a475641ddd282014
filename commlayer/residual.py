"""Error feedback for losses: what of a gradient was not counted in one step is added to it in the next.

After Seide et al. ("1-Bit Stochastic Gradient Descent", Interspeech 2014), where quantisation loses a part; here the
network does, and the engine says which one. Kept by parameter, since DDP may regroup its buckets at any time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError

Stretches = list[tuple[int, Tensor]]
"""Parts of a flat gradient: the element where each begins, and its values."""


class Residual:
    """What has not been counted yet, as a few stretches of some parameters' gradients.

    Checkpoints know parameters by number, in the order in which they are met first. DDP's first step goes by its first
    buckets, which depend on the model alone, so that the numbers are the same in another process.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Stretches] = {}
        self._numbers: dict[Tensor, int] = {}
        self._restored: dict[int, Stretches] = {}  # by number, of parameters that have not been met

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """Numbers those of the parameters that are new, and gives them what was restored for their numbers.

        Raises ConfigError if that cannot be a part of them.
        """
        for parameter in parameters:
            if parameter in self._numbers:
                continue
            number = self._numbers[parameter] = len(self._numbers)
            stretches = self._restored.pop(number, [])
            if any(offset + len(values) > parameter.numel() for offset, values in stretches):
                raise ConfigError(
                    f"a restored residual for parameter {number} is longer than its {parameter.numel()} elements: it "
                    f"is of another model; restore that of this model, or a new HookState"
                )
            if stretches:
                self._kept[parameter] = stretches

    def add_to(self, buffer: Tensor, parameters: Sequence[Tensor], starts: Sequence[int]) -> list[tuple[int, int]]:
        """Adds what is kept for these parameters to a flat buffer of their gradients, and forgets it.

        starts[i] is the element of `buffer` where the gradient of parameters[i] begins, ascending. Returns where
        something was added, as (start, end) in elements: what must not be lost a second time.
        """
        self.meet(parameters)
        again = []
        for parameter, start in zip(parameters, starts, strict=True):
            for offset, values in self._kept.pop(parameter, ()):
                again.append((start + offset, start + offset + len(values)))
                buffer[slice(*again[-1])].add_(values)
        return again

    def keep(
        self, buffer: Tensor, parameters: Sequence[Tensor], starts: Sequence[int], missing: Sequence[tuple[int, int]]
    ) -> None:
        """Keeps the parts of `buffer` that were not counted: (offset, length) in bytes. Infinities and NaN are not
        worth keeping: the step that made them is skipped, or lost anyway."""
        for offset, length in missing:
            at, end = offset // buffer.itemsize, (offset + length) // buffer.itemsize
            while at < end:
                index = bisect_right(starts, at) - 1
                until = min(end, starts[index + 1]) if index + 1 < len(starts) else end
                values = torch.nan_to_num(buffer[at:until], nan=0.0, posinf=0.0, neginf=0.0)
                self._kept.setdefault(parameters[index], []).append((at - starts[index], values))
                at = until

    def total(self, parameter: Tensor) -> Tensor:
        """What is kept for one parameter, as a tensor of its shape."""
        flat = torch.zeros(parameter.numel(), dtype=parameter.dtype)
        for offset, values in self._kept.get(parameter, ()):
            flat[offset : offset + len(values)] += values.to(flat.dtype)
        return flat.view(parameter.shape)

    def state_dict(self) -> dict[int, Any]:
        """What is kept, by the parameters' numbers; to be called between steps."""
        return self._restored | {self._numbers[each]: list(stretches) for each, stretches in self._kept.items()}

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Takes over what `state_dict` returned; parameters are numbered afresh."""
        self._kept, self._numbers = {}, {}
        self._restored = {number: list(stretches) for number, stretches in state.items()}

    def check_met(self) -> None:
        """Raises ConfigError when something was restored for parameters that do not exist: all have been met."""
        if self._restored:
            raise ConfigError(
                f"a restored residual has something for parameter {max(self._restored)}, and the model has "
                f"{len(self._numbers)}: it is of another model; restore that of this model, or a new HookState"
            )
