"""`Travel`: how the values of split layers travel: as they are, or in a codec, whose error can be measured."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, _register_work

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


@dataclass
class LayerError:
    """The relative errors of one layer's exchanges: the Euclidean norm of what a codec has changed, divided by that of
    the exact result. NaN: nothing was exchanged."""

    forward: float = math.nan
    """Of the layer's output."""
    backward: float = math.nan
    """Of its input's gradient."""


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
        made = _group_of(group)
        self._check_device(made, values, layer)
        result = values.detach().clone(memory_format=torch.contiguous_format)
        self._count += 1  # one more on every rank
        work = made.allreduce([result], AllreduceOptions(), policy=self._policy, key=self._count)
        if self._errors is not None:
            work.wait()
            exact = funcol.wait_tensor(funcol.all_reduce(values, "sum", group))
            squares = self._squares.setdefault((layer, way), _Squares())
            setattr(self._errors.setdefault(layer, LayerError()), way, squares.add(result, exact))
            return result
        _register_work(result, work)
        return funcol.AsyncCollectiveTensor(result)

    def _check_device(self, group: Any, values: Tensor, layer: str) -> None:
        if group.devices is not None and group.devices.neighbour(values.device.type) is not None:
            raise ConfigError(
                f"{group.who}: {WHO}(codec={self.codec!r}): another backend has the {values.device.type} tensors of "
                f"{layer}; call init_process_group('commlayer') without a backend for {values.device.type}"
            )


def _group_of(group: Group) -> Any:
    return group[0].get_group(group[1]) if isinstance(group, tuple) else group
