"""`Feedback`: contributions that were not counted in one step are added to the gradient of the next.

Error feedback after Seide et al. ("1-Bit Stochastic Gradient Descent", Interspeech 2014). A codec loses a part of the
gradient by rounding, the network loses packets, and the engine says which parts. The residual is kept by parameter,
since DDP may regroup its buckets at any time.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from .extent import extents
from .values import is_zero

log = logging.getLogger("commlayer")


class Stretch(NamedTuple):
    """A part of a parameter's flat residual. A late one may consist of zeros: it marks values of another stretch."""

    offset: int
    """The element where it begins."""
    values: Tensor
    late: bool = True
    """Whether it was lost, and must not be lost again."""


class Added(NamedTuple):
    """The residual that was added to a buffer."""

    late: list[tuple[int, int]]
    """(start, end) in elements of the parts that must not be lost again: no gradient shall be over a step late."""
    stretches: dict[Tensor, list[Stretch]]
    """The stretches of each parameter."""


class Feedback:
    """The residual: stretches of some parameters' gradients that have not been counted yet.

    `dtype` is that of stored rounding errors.

    Checkpoints know parameters by number, in the order in which they are met first, the last of each bucket first.
    DDP's first step goes from the model's last parameters to its first ones, so this is the model's own order,
    backwards, whatever the size of its buckets.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._kept: dict[Tensor, list[Stretch]] = {}
        self._numbers: dict[Tensor, int] = {}
        self._restored: dict[int, list[Stretch]] = {}  # stretches by number, of parameters not met since
        self._restored_sizes: list[int] = []  # sizes by number
        self._restored_orders: list[list[int]] = []  # orders by number; empty: saved by a former version
        self._rank: int | None = None  # the rank whose residual this is; None: not known yet
        self._loss_scale = 1.0  # the scale of the residual

    def __bool__(self) -> bool:
        return bool(self._kept or self._restored)

    def begin_step(self, rank: int, loss_scale: float, who: str) -> None:
        """Prepares the residual for the gradients of a step on `rank` of the group, whose loss is multiplied with
        `loss_scale`. `who`: the rank in texts.

        The residual of another rank is dropped, because that rank adds it itself.
        """
        if self._rank not in (None, rank) and self:
            log.warning(
                "%s: the restored HookState is that of rank %s of the group, whose residual is dropped; let every rank "
                "save and restore its own",
                who,
                self._rank,
            )
            self.clear()
        self._rank = rank
        if loss_scale != self._loss_scale:
            factor, self._loss_scale = loss_scale / self._loss_scale, loss_scale
            for stretches in (*self._kept.values(), *self._restored.values()):
                stretches[:] = [stretch._replace(values=stretch.values * factor) for stretch in stretches]

    def has_met(self, parameters: Sequence[Tensor]) -> bool:
        """Whether all of them have numbers."""
        return all(parameter in self._numbers for parameter in parameters)

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """Numbers new parameters, and gives every parameter the residual restored for its number.

        Raises ConfigError if a restored residual is of a parameter of another size, or of another order in memory.
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
                self._check_order(number, parameter)
                self._kept[parameter] = self._restored.pop(number)

    def _check_order(self, number: int, parameter: Tensor) -> None:
        """Raises ConfigError if the values of a restored residual lie in another order than the parameter's."""
        own, saved = _order_of(parameter), [*self._restored_orders[number : number + 1]]
        if saved not in ([], [own]):
            raise ConfigError(
                f"a restored residual of parameter {number} from the end, of shape {tuple(parameter.shape)}, was saved "
                f"with its dimensions in the order {saved[0]} in memory, and the parameter has {own}: give the model "
                f"the memory format that it had, as channels_last or transposed, or use a new HookState"
            )

    def numbers_of(self, parameters: Iterable[Tensor]) -> list[int]:
        """The numbers by which checkpoints know them."""
        return [self._numbers[parameter] for parameter in parameters]

    def numbers_where(self, chosen: Callable[[Tensor], bool]) -> list[int]:
        """The numbers of all known parameters for which `chosen` is true."""
        return [number for parameter, number in self._numbers.items() if chosen(parameter)]

    def add_to(
        self,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        starts: Sequence[int],
        outside: tuple[int, int] | None = None,
    ) -> Added:
        """Adds these parameters' residual to `buffer`, the flat buffer of their gradients; it stays until `spend`.

        `starts`: see `extents`. Stretches that do not lie within the buffer wait; with `outside`, (start, end) in
        elements of the buffer, also those that lie within that range. The residual of a parameter whose gradient is all
        zero waits: the parameter may be unused in this step, and then DDP drops its average.
        """
        self.meet(parameters)
        added, size = Added([], {}), len(buffer)
        for parameter, start, extent in zip(parameters, starts, extents(parameters, starts, size), strict=True):
            if parameter not in self._kept or is_zero(buffer[slice(*extent)]):
                continue
            for stretch in self._kept[parameter]:
                where = start + stretch.offset, start + stretch.offset + len(stretch.values)
                if not _lies_in(where, (0, size)) or (outside is not None and _lies_in(where, outside)):
                    continue
                added.stretches.setdefault(parameter, []).append(stretch)
                added.late.extend([where] * stretch.late)
                buffer[slice(*where)].add_(stretch.values.to(buffer.device))
        return added

    def spend(self, added: Added) -> None:
        """Forgets the residual that `add_to` has added, once the step is known to count; `keep` comes after it."""
        for parameter, spent in added.stretches.items():
            gone = set(map(id, spent))
            left = [residual for residual in self._kept.pop(parameter) if id(residual) not in gone]
            if left:
                self._kept[parameter] = left

    def keep(
        self, buffer: Tensor, parameters: Sequence[Tensor], starts: Sequence[int], missing: Sequence[tuple[int, int]]
    ) -> None:
        """Keeps the parts of `buffer` that were not counted: `missing` has their (offset, length) in bytes.

        Infinities and NaN are kept as 0: the network lost them.
        """
        for index, start, end in _by_parameter(buffer, starts, missing):
            values = _finite(buffer[start:end])
            if not is_zero(values):
                self._kept.setdefault(parameters[index], []).append(Stretch(start - starts[index], values))

    def keep_errors(
        self,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        starts: Sequence[int],
        kept: Sequence[tuple[int, int]],
        missing: Sequence[tuple[int, int]],
        added: Added,
    ) -> None:
        """Keeps the parts `kept` of `buffer`: rounding errors and, where `missing`, whole contributions, which must not
        be lost again. Both have (offset, length) in bytes.

        It reuses the memory of the stretches that `add_to` returned, so no second copy of the residual is allocated.
        Infinities and NaN are kept as 0.
        """
        lost = [(start, end) for _, start, end in _by_parameter(buffer, starts, missing)]
        for index, start, end in _by_parameter(buffer, starts, _merged(kept)):
            parameter, offset = parameters[index], start - starts[index]
            part = buffer[start:end]
            if is_zero(part):
                continue
            stretches = self._kept.setdefault(parameter, [])  # not empty: the residual of an unused parameter waits
            waiting = self._find(stretches, offset, part)
            values = self._find(added.stretches.get(parameter, ()), offset, part)
            if waiting is not None:
                waiting.add_(_finite(part))
                continue
            values = part.new_empty(len(part), dtype=self.dtype) if values is None else values
            stretches.append(Stretch(offset, _finite(part, values), late=False))
            none = values.new_zeros(())  # the values are in the stretch above; these say only that they are late
            stretches += [
                Stretch(max(first, start) - starts[index], none.expand(min(last, end) - max(first, start)))
                for first, last in lost
                if first < end and last > start
            ]

    def _find(self, stretches: Iterable[Stretch], offset: int, like: Tensor) -> Tensor | None:
        """The values of a stretch that begins at `offset` and is as long as `like`, if their memory can be reused."""
        for stretch in stretches:
            if (stretch.offset, len(stretch.values), stretch.values.dtype, stretch.late) == (
                offset,
                len(like),
                self.dtype,
                False,
            ):
                return stretch.values
        return None

    def clear(self) -> None:
        """Forgets the residual, but not the parameters' numbers."""
        self._kept, self._restored, self._restored_sizes, self._restored_orders = {}, {}, [], []

    def state_dict(self) -> dict[str, Any]:
        """The residual by the parameters' numbers; to be called between steps."""
        kept = {self._numbers[parameter]: stretches for parameter, stretches in self._kept.items()}
        sizes = [parameter.numel() for parameter in self._numbers] or self._restored_sizes
        plain = {
            number: [(offset, values.clone(), late) for offset, values, late in stretches]
            for number, stretches in sorted((self._restored | kept).items())  # buckets may end in another order
        }
        orders = [_order_of(parameter) for parameter in self._numbers] or self._restored_orders
        return {
            "kept": plain,
            "sizes": sizes,
            "orders": orders,
            "rank": self._rank,
            "loss_scale": self._loss_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the value of `state_dict`. Parameters keep their numbers until `renumber`."""
        self.clear()
        self._restored = {
            number: [Stretch(offset, values.clone(), *late) for offset, values, *late in stretches]
            for number, stretches in state.get("kept", {}).items()
        }
        self._restored_sizes = list(state.get("sizes", ()))
        self._restored_orders = list(state.get("orders", ()))
        self._rank = state.get("rank")
        self._loss_scale = state.get("loss_scale", 1.0)

    def renumber(self) -> None:
        """Forgets the parameters, before those of another model."""
        self._numbers, self._kept = {}, {}

    def check_met(self) -> None:
        """Raises ConfigError at the end of a step if a restored residual is of a parameter that the model lacks."""
        if self._restored:
            raise ConfigError(
                f"a restored residual has values for parameter {max(self._restored)} from the end, but the model has "
                f"{len(self._numbers)} parameters: it belongs to another model; restore the state of this model, or "
                f"use a new HookState"
            )


def _finite(values: Tensor, out: Tensor | None = None) -> Tensor:
    """The values, with 0 in place of infinities and of NaN, which may come of a lost packet; in the memory of `out`."""
    if out is not None and out.dtype != values.dtype:
        return out.copy_(_finite(values))
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0, out=out)


def _lies_in(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    """Whether a range, (start, end), lies within another one."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _order_of(parameter: Tensor) -> list[int]:
    """The dimensions longer than 1, the one whose neighbours lie farthest apart in memory first."""
    long = [dim for dim, size in enumerate(parameter.shape) if size > 1]
    return sorted(long, key=parameter.stride, reverse=True)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same (offset, length), where neighbours are one."""
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if merged and sum(merged[-1]) == offset:
            offset, length = merged[-1][0], merged.pop()[1] + length
        merged.append((offset, length))
    return merged


def _by_parameter(
    buffer: Tensor, starts: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Cuts ranges, (offset, length) in bytes, at the starts of parameters: (index of the parameter, start, end)."""
    for offset, length in ranges:
        at, end = offset // buffer.itemsize, (offset + length) // buffer.itemsize
        while at < end:
            index = bisect_right(starts, at) - 1
            until = min(end, starts[index + 1]) if index + 1 < len(starts) else end
            yield index, at, until
            at = until
