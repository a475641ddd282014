"""Sequence parallelism in a batch whose parts take turns (parts.py): activations are split along the sequence between
the layers (Korthikanti et al., arXiv 2205.05198).

A row layer ends with a reduce-scatter instead of an all-reduce, and a column layer begins with an all-gather. Each of
them ends a turn. In the backward pass the opposite exchange is at the same place, so that the parts take turns there,
too: autograd runs the ready operation with the highest number, and `Land`, which starts the opposite exchange, belongs
to the turn after `Depart`, which waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from ...errors import ConfigError
from ..work.context import priority
from .parts import Part
from .travel import LATENCY_CLASS, WHO, Group, Travel, Waiting


class Trip:
    """One exchange, and the opposite one in the backward pass."""

    def __init__(self, travel: Travel, group: Group, dim: int, layer: str, *, gathers: bool) -> None:
        self._travel, self._group, self._dim, self._layer, self._gathers = travel, group, dim, layer, gathers
        self._waiting: list[Waiting] = []

    def start(self, values: Tensor) -> None:
        """Starts the exchange of the forward pass."""
        kind = self._travel.all_gather if self._gathers else self._travel.reduce_scatter
        self._waiting = [kind(values, self._dim, self._group, self._layer, "forward")]

    def start_back(self, gradient: Tensor) -> None:
        """Starts the opposite exchange."""
        kind = self._travel.reduce_scatter if self._gathers else self._travel.all_gather
        with priority(LATENCY_CLASS):
            self._waiting = [kind(gradient, self._dim, self._group, self._layer, "backward")]

    def landed(self) -> Tensor:
        """Waits for the exchange that was started; returns what has arrived."""
        return self._waiting.pop()()


class Depart(torch.autograd.Function):
    """Starts the exchange; the backward pass waits for the opposite one. Returns a token: no value, only an edge."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.start(values)
        return values.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.landed(), None


class Land(torch.autograd.Function):
    """Waits for the exchange; the backward pass starts the opposite one."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.landed()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start_back(gradient)
        return gradient.new_zeros(0), None


def exchanged(part: Part, values: Tensor, trip: Trip, where: str) -> Tensor:
    """The result of an exchange, during which the other parts run."""
    token = Depart.apply(values, trip)  # type: ignore[no-untyped-call]
    part.pass_turn(where)
    found: Tensor = Land.apply(token, trip)  # type: ignore[no-untyped-call]
    return found


def gathered(
    part: Part, given: Tensor, mesh: DeviceMesh, layout: Shard, travel: Travel, layer: str, where: str
) -> Tensor:
    """The whole input of a column layer, of which `given` is this rank's part of the sequence.

    Layers in a row with the same input, as q, k and v, share one exchange: that of the first one.
    """
    if part.entry is not None and part.entry[0] is given and part.entry[1] == given._version:
        return part.entry[2]
    values = given
    if isinstance(given, DTensor):  # as of SequenceParallel
        if given.placements != (layout,):
            raise ConfigError(f"{WHO}: {where} is given {given.placements}, and not {(layout,)}; make its layouts fit")
        values = given.to_local()
    check_dim(values, layout, where)
    trip = Trip(travel, (mesh, 0), layout.dim, layer, gathers=True)
    whole = exchanged(part, values, trip, where)
    part.entry = given, given._version, whole
    return whole


def scattered(part: Part, output: DTensor, layout: Shard, travel: Travel, layer: str, where: str) -> DTensor:
    """This rank's part of the sum of a row layer's outputs."""
    mesh, values = output.device_mesh, output.to_local()
    check_dim(values, layout, where)
    length, size = values.shape[layout.dim], mesh.size()
    if length % size:
        raise ConfigError(
            f"{WHO}: {where} has {length} places in dimension {layout.dim}, which do not divide among {size} ranks; "
            f"pad the sequences"
        )
    trip = Trip(travel, (mesh, 0), layout.dim, layer, gathers=False)
    own = exchanged(part, values, trip, where)
    return DTensor.from_local(own, mesh, (layout,), run_check=False)


def check_dim(values: Tensor, layout: Shard, where: str) -> None:
    """Raises ConfigError unless the layout splits another dimension than the last one."""
    if not 0 <= layout.dim < values.dim() - 1:
        raise ConfigError(
            f"{WHO}: {where} splits dimension {layout.dim} of {values.dim()}; sequence parallelism splits the "
            f"sequence, as Shard(1)"
        )


# ---- hooks of styles ------------------------------------------------------------------------------------------------


class ReplacedHook:
    """A pre-hook of a module, replaced until `remove`."""

    def __init__(self, module: nn.Module, key: int, hook: Callable[..., Any]) -> None:
        self._hooks, self._key, self._hook = module._forward_pre_hooks, key, hook
        self._kept = self._hooks[key]
        self._hooks[key] = hook

    def remove(self) -> None:
        if self._hooks.get(self._key) is self._hook:
            self._hooks[self._key] = self._kept


def sequence_arguments(style: PrepareModuleInput) -> list[int]:
    """The places of arguments whose sequence the style gathers. Raises ConfigError for forms that cannot be split."""
    given, desired = style.input_layouts or (), style.desired_input_layouts or ()
    of_names = zip(style.input_kwarg_layouts.values(), style.desired_input_kwarg_layouts.values(), strict=True)
    found = [i for i, pair in enumerate(zip(given, desired, strict=True)) if _gathers(*pair)]
    if any(_gathers(*pair) for pair in of_names):
        raise ConfigError(f"{WHO}: {style} gathers an argument that has a name; pass it by its place")
    if found and style.use_local_output:
        raise ConfigError(f"{WHO}: {style} gathers into plain tensors; leave use_local_output at its default")
    return found


def _gathers(given: Any, desired: Any) -> bool:
    return isinstance(given, Shard) and desired == Replicate()
