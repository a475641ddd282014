"""`Feedback`: contributions that were not counted in one step are added to the gradient of the next.

Error feedback after Seide et al. ("1-Bit Stochastic Gradient Descent", Interspeech 2014). There quantisation loses a
part of the gradient; here the network does, and the engine says which one. The residual is kept by parameter, since DDP
may regroup its buckets at any time.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

log = logging.getLogger("commlayer")

Stretches = list[tuple[int, Tensor]]
"""Parts of a flat gradient: the element where each begins, and its values."""


class Feedback:
    """The residual: a few stretches of some parameters' gradients that have not been counted yet.

    Checkpoints know parameters by number, in the order in which they are met first, the last of each bucket first.
    DDP's first step goes from the model's last parameters to its first ones, so this is the model's own order,
    backwards, whatever the size of its buckets.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Stretches] = {}
        self._numbers: dict[Tensor, int] = {}
        self._restored: dict[int, Stretches] = {}  # by number, of parameters that have not been met since
        self._restored_sizes: list[int] = []  # by number
        self._rank: int | None = None  # the rank whose residual this is; None: not known yet
        self._loss_scale = 1.0  # of the residual

    def __bool__(self) -> bool:
        return bool(self._kept or self._restored)

    def begin_step(self, rank: int, loss_scale: float) -> None:
        """Prepares the residual for the gradients of a step on `rank`, whose loss is multiplied with `loss_scale`.

        The residual of another rank is dropped: that rank adds it, too.
        """
        if self._rank not in (None, rank) and self:
            log.warning(
                "rank %d restored the HookState of rank %s and drops its residual; let every rank save and restore its "
                "own",
                rank,
                self._rank,
            )
            self.clear()
        self._rank = rank
        if loss_scale != self._loss_scale:
            factor, self._loss_scale = loss_scale / self._loss_scale, loss_scale
            for stretches in (*self._kept.values(), *self._restored.values()):
                stretches[:] = [(offset, values * factor) for offset, values in stretches]

    def has_met(self, parameters: Sequence[Tensor]) -> bool:
        """Whether all of them have numbers."""
        return all(parameter in self._numbers for parameter in parameters)

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """Numbers new parameters, and gives every parameter the residual restored for its number.

        Raises ConfigError if a restored residual is of a parameter of another size.
        """
        for parameter in reversed(parameters):
            number = self._numbers.setdefault(parameter, len(self._numbers))
            if number < len(self._restored_sizes) and self._restored_sizes[number] != parameter.numel():
                raise ConfigError(
                    f"a restored residual has {self._restored_sizes[number]} elements for parameter {number} from the "
                    f"end, but the parameter has {parameter.numel()}: it belongs to another model; restore the state "
                    f"of this model, or use a new HookState"
                )
            if number in self._restored:
                self._kept[parameter] = self._restored.pop(number)

    def add_to(self, buffer: Tensor, parameters: Sequence[Tensor], starts: Sequence[int]) -> list[tuple[int, int]]:
        """Adds the residual of these parameters to `buffer`, the flat buffer of their gradients, and forgets it.

        starts[i] is the element of `buffer` where the gradient of parameters[i] begins, ascending. Returns where
        something was added, as (start, end) in elements; these parts must not be lost a second time. The residual of a
        parameter whose gradient is all zero waits: the parameter may be unused in this step, and then DDP drops its
        average.
        """
        self.meet(parameters)
        added: list[tuple[int, int]] = []
        for parameter, start in zip(parameters, starts, strict=True):
            if parameter not in self._kept or not buffer[start : start + parameter.numel()].any():
                continue
            for offset, values in self._kept.pop(parameter):
                added.append((start + offset, start + offset + len(values)))
                buffer[slice(*added[-1])].add_(values.to(buffer.device))
        return added

    def keep(
        self, buffer: Tensor, parameters: Sequence[Tensor], starts: Sequence[int], missing: Sequence[tuple[int, int]]
    ) -> None:
        """Keeps the parts of `buffer` that were not counted: `missing` has their (offset, length) in bytes.

        Infinities and NaN are kept as 0: the step that made them is skipped, or lost anyway.
        """
        for offset, length in missing:
            at, end = offset // buffer.itemsize, (offset + length) // buffer.itemsize
            while at < end:
                index = bisect_right(starts, at) - 1
                until = min(end, starts[index + 1]) if index + 1 < len(starts) else end
                values = torch.nan_to_num(buffer[at:until], nan=0.0, posinf=0.0, neginf=0.0)
                if values.any():
                    self._kept.setdefault(parameters[index], []).append((at - starts[index], values))
                at = until

    def clear(self) -> None:
        """Forgets the residual, but not the parameters' numbers."""
        self._kept, self._restored, self._restored_sizes = {}, {}, []

    def state_dict(self) -> dict[str, Any]:
        """The residual by the parameters' numbers; to be called between steps."""
        kept = {self._numbers[each]: list(stretches) for each, stretches in self._kept.items()}
        sizes = [parameter.numel() for parameter in self._numbers] or self._restored_sizes
        return {"kept": self._restored | kept, "sizes": sizes, "rank": self._rank, "loss_scale": self._loss_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the value of `state_dict`. Parameters keep their numbers until `renumber`."""
        self.clear()
        self._restored = {number: list(stretches) for number, stretches in state.get("kept", {}).items()}
        self._restored_sizes = list(state.get("sizes", ()))
        self._rank = state.get("rank")
        self._loss_scale = state.get("loss_scale", 1.0)

    def renumber(self) -> None:
        """Forgets the parameters, before those of another model."""
        self._numbers, self._kept = {}, {}

    def check_met(self) -> None:
        """For the end of a step. Raises ConfigError if a restored residual is of a parameter that the model lacks."""
        if self._restored:
            raise ConfigError(
                f"a restored residual has values for parameter {max(self._restored)} from the end, but the model has "
                f"{len(self._numbers)} parameters: it belongs to another model; restore the state of this model, or "
                f"use a new HookState"
            )
