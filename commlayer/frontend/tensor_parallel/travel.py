"""`Travel`: how the values of split layers travel: as they are, or in a codec, whose error can be measured."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions, _register_work

from ...config import Config, Policy
from ...errors import ConfigError
from ..gradients.disabled import warn
from ..group.backend import CommProcessGroup

WHO = "tp.overlap"

LATENCY_CLASS = 0
"""The class of collectives that the next operation of their part waits for."""

Codec = Literal["none", "f16", "bf16", "int8"]
Way = Literal["forward", "backward"]

Group = Any
"""What functional collectives take: a process group, or a mesh and a dimension."""

Waiting = Callable[[], Tensor]
"""Waits for an exchange, and returns what has arrived."""

# The names before torch 2.13.
_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


@dataclass
class LayerError:
    """The relative errors of one layer's exchanges: the Euclidean norm of what a codec has changed, divided by that of
    the exact result. NaN: nothing was exchanged."""

    forward: float = math.nan
    """The error of the layer's output."""
    backward: float = math.nan
    """The error of its input's gradient."""


class _Squares:
    """Sums of squares over all exchanges of one layer and direction."""

    def __init__(self) -> None:
        self._changed = self._exact = 0.0

    def add(self, coded: Tensor, exact: Tensor) -> float:
        """Adds one exchange; returns the relative error so far."""
        self._changed += float((coded.double() - exact.double()).square().sum())
        self._exact += float(exact.double().square().sum())
        if self._changed == 0:
            return 0.0
        return math.sqrt(self._changed / self._exact) if self._exact else math.inf


class Travel:
    """The collectives of one `tp.overlap`. All ranks of a group start the same ones in one order."""

    def __init__(self, codec: str) -> None:
        """Raises ConfigError for an unknown codec."""
        if codec not in get_args(Codec):
            raise ConfigError(
                f"{WHO}(codec={codec!r}): use one of {', '.join(get_args(Codec))}; the others keep errors for the next "
                f"step of a gradient, which activations do not have"
            )
        if codec != "none" and Config.is_disabled():
            warn(f"{WHO}(codec={codec!r})", "activations travel as they are")
            codec = "none"
        self.codec = codec
        self._policy = Policy(codec=codec, priority=LATENCY_CLASS)
        self._count = 0
        self._errors: dict[str, LayerError] | None = None
        self._squares: dict[tuple[str, Way], _Squares] = {}

    @contextlib.contextmanager
    def measured(self) -> Iterator[dict[str, LayerError]]:
        """See `SplitBatch.measured`."""
        if self._errors is not None:
            raise ConfigError(f"{WHO}: measured() within measured(); leave one out")
        self._errors, self._squares = {}, {}
        try:
            yield self._errors
        finally:
            self._errors = None

    def check(self, group: Group, where: str) -> None:
        """Raises ConfigError if the codec needs this package's group, and this is another one."""
        if self.codec == "none":
            return
        made = _group_of(group)
        if not isinstance(made, CommProcessGroup):
            raise ConfigError(
                f"rank {dist.get_rank()}: {WHO}(codec={self.codec!r}): the group {made.group_name!r} of {where} is not "
                f"commlayer's; call init_process_group('commlayer'), or leave the codec out"
            )

    def all_reduce(self, values: Tensor, group: Group, layer: str, way: Way) -> Tensor:
        """The sum over all ranks, which is waited for at its first use."""
        if self.codec == "none":
            summed: Tensor = funcol.all_reduce(values, "sum", group)
            return summed
        result = values.detach().clone(memory_format=torch.contiguous_format)
        made, key = self._next(group, values, layer)
        work = made.allreduce([result], AllreduceOptions(), policy=self._policy, key=key)
        if self._errors is not None:
            work.wait()
            return self._measured(result, funcol.all_reduce(values, "sum", group), layer, way)
        _register_work(result, work)
        return funcol.AsyncCollectiveTensor(result)

    def all_gather(self, values: Tensor, dim: int, group: Group, layer: str, way: Way) -> Waiting:
        """Starts to gather the parts of dimension `dim`, one of each rank."""
        source, size = values.detach().contiguous(), _group_of(group).size()

        def whole(parts: Tensor) -> Tensor:
            return parts if dim == 0 else torch.cat(parts.chunk(size), dim)

        if self.codec == "none":
            arriving = _gather(source, 0, group)
            return lambda: whole(_awaited(arriving))
        made, key = self._next(group, values, layer)
        result = source.new_empty((size * source.shape[0], *source.shape[1:]))
        work = made.all_gather_single(result, source, AllgatherOptions(), policy=self._policy, key=key)

        def wait() -> Tensor:
            work.wait()
            return whole(result)

        if self._errors is None:
            return wait
        found = self._measured(wait(), whole(_awaited(_gather(source, 0, group))), layer, way)
        return lambda: found

    def reduce_scatter(self, values: Tensor, dim: int, group: Group, layer: str, way: Way) -> Waiting:
        """Starts to add up all ranks' values, of which each rank gets its part of dimension `dim`."""
        size = _group_of(group).size()
        source = values.detach().contiguous()
        if dim:
            source = torch.cat(source.chunk(size, dim))
        if self.codec == "none":
            arriving = _scatter(source, "sum", 0, group)
            return lambda: _awaited(arriving)
        made, key = self._next(group, values, layer)
        result = source.new_empty((source.shape[0] // size, *source.shape[1:]))
        work = made.reduce_scatter_single(result, source, ReduceScatterOptions(), policy=self._policy, key=key)

        def wait() -> Tensor:
            work.wait()
            return result

        if self._errors is None:
            return wait
        found = self._measured(wait(), _scatter(source, "sum", 0, group), layer, way)
        return lambda: found

    def _next(self, group: Group, values: Tensor, layer: str) -> tuple[Any, int]:
        """The group, and the codec key of its next exchange: equal on all ranks, which start the same ones."""
        made = _group_of(group)
        self._check_device(made, values, layer)
        self._count += 1
        return made, self._count

    def _measured(self, coded: Tensor, exact: Tensor, layer: str, way: Way) -> Tensor:
        """The values with the codec, whose error is noted."""
        if self._errors is not None:
            squares = self._squares.setdefault((layer, way), _Squares())
            setattr(self._errors.setdefault(layer, LayerError()), way, squares.add(coded, _awaited(exact)))
        return coded

    def _check_device(self, group: Any, values: Tensor, layer: str) -> None:
        if group.devices is not None and group.devices.neighbour(values.device.type) is not None:
            raise ConfigError(
                f"{group.who}: {WHO}(codec={self.codec!r}): another backend has the {values.device.type} tensors of "
                f"{layer}; call init_process_group('commlayer') without a backend for {values.device.type}"
            )


def _group_of(group: Group) -> Any:
    return group[0].get_group(group[1]) if isinstance(group, tuple) else group


def _awaited(values: Tensor) -> Tensor:
    return values.wait() if isinstance(values, funcol.AsyncCollectiveTensor) else values
