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

from ..errors import ConfigError

Stretches = list[tuple[int, Tensor]]
"""Parts of a flat gradient: the element where each begins, and its values."""


class Feedback:
    """What has not been counted yet, as a few stretches of some parameters' gradients.

    Checkpoints know parameters by number, in the order in which they are met first, the last of each bucket first.
    DDP's first step goes from the model's last parameters to its first ones, so that this is the model's own order,
    backwards, however large its buckets are.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Stretches] = {}
        self._numbers: dict[Tensor, int] = {}
        self._restored: dict[int, Stretches] = {}  # by number, of parameters that have not been met since
        self._restored_sizes: list[int] = []  # by number

    def __bool__(self) -> bool:
        return bool(self._kept or self._restored)

    def has_met(self, parameters: Sequence[Tensor]) -> bool:
        """Whether it knows all of them."""
        return all(parameter in self._numbers for parameter in parameters)

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """Numbers those of the parameters that are new, and gives all what was restored for their numbers.

        Raises ConfigError if that was of other parameters.
        """
        for parameter in reversed(parameters):
            number = self._numbers.setdefault(parameter, len(self._numbers))
            if number < len(self._restored_sizes) and self._restored_sizes[number] != parameter.numel():
                raise ConfigError(
                    f"a restored residual has {self._restored_sizes[number]} elements for parameter {number} from the "
                    f"end, which has {parameter.numel()}: it is of another model; restore that of this model, or a new "
                    f"HookState"
                )
            if number in self._restored:
                self._kept[parameter] = self._restored.pop(number)

    def add_to(self, buffer: Tensor, parameters: Sequence[Tensor], starts: Sequence[int]) -> list[tuple[int, int]]:
        """Adds what is kept for these parameters to a flat buffer of their gradients, and forgets it.

        starts[i] is the element of `buffer` where the gradient of parameters[i] begins, ascending. Returns where
        something was added, as (start, end) in elements: what must not be lost a second time. A parameter whose
        gradient is all zero may not be used in this step, and then DDP drops its average: what it has waits.
        """
        self.meet(parameters)
        again: list[tuple[int, int]] = []
        for parameter, start in zip(parameters, starts, strict=True):
            if parameter not in self._kept or not buffer[start : start + parameter.numel()].any():
                continue
            for offset, values in self._kept.pop(parameter):
                again.append((start + offset, start + offset + len(values)))
                buffer[slice(*again[-1])].add_(values.to(buffer.device))
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
                if values.any():
                    self._kept.setdefault(parameters[index], []).append((at - starts[index], values))
                at = until

    def total(self, parameter: Tensor) -> Tensor:
        """What is kept for one parameter, as a tensor of its shape."""
        flat = torch.zeros(parameter.numel(), dtype=parameter.dtype)
        for offset, values in self._kept.get(parameter, ()):
            flat[offset : offset + len(values)] += values.to(flat.dtype)
        return flat.view(parameter.shape)

    def scale(self, factor: float) -> None:
        """Multiplies all that is kept, as what it will be added to was."""
        for stretches in (*self._kept.values(), *self._restored.values()):
            stretches[:] = [(offset, values * factor) for offset, values in stretches]

    def clear(self) -> None:
        """Forgets what is kept, but not how parameters are numbered."""
        self._kept, self._restored, self._restored_sizes = {}, {}, []

    def state_dict(self) -> dict[str, Any]:
        """What is kept, by the parameters' numbers; to be called between steps."""
        kept = {self._numbers[each]: list(stretches) for each, stretches in self._kept.items()}
        sizes = [parameter.numel() for parameter in self._numbers]
        return {"kept": self._restored | kept, "sizes": sizes or self._restored_sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned. Parameters keep their numbers until `renumber`."""
        self.clear()
        self._restored = {number: list(stretches) for number, stretches in state.get("kept", {}).items()}
        self._restored_sizes = list(state.get("sizes", ()))

    def renumber(self) -> None:
        """Forgets the parameters, for those of another model to come."""
        self._numbers, self._kept = {}, {}

    def check_met(self) -> None:
        """Raises ConfigError when something was restored for parameters that do not exist: all have been met."""
        if self._restored:
            raise ConfigError(
                f"a restored residual has something for parameter {max(self._restored)} from the end, and the model "
                f"has {len(self._numbers)}: it is of another model; restore that of this model, or a new HookState"
            )
