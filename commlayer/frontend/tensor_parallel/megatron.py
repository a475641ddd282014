"""Megatron-core's column and row parallel layers in a batch whose parts take turns (parts.py).

They are found by name, so that Megatron-core need not be installed. While a part runs, attributes of a layer switch off
its own communication: the input gradient of a column layer is reduced by `layers.entered`, the output of a row
layer by `layers.Sum`. Neither waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...errors import ConfigError
from .layers import Sum, entered
from .parts import current_part
from .travel import Travel

COLUMN, ROW = "ColumnParallelLinear", "RowParallelLinear"

LEFT_OUT = {
    COLUMN: {"allreduce_dgrad": False, "disable_grad_reduce": True},
    ROW: {"explicit_expert_comm": True, "skip_bias_add": True},
}
"""Attributes with which a layer's forward does not communicate, and a row layer leaves its bias to the caller."""


def hook_megatron(root: nn.Module, travel: Travel) -> list[RemovableHandle]:
    """Hooks of all layers of Megatron-core. Raises ConfigError for those that cannot be split."""
    kinds = {name: (module, _kind(module)) for name, module in root.named_modules()}
    for name, (module, kind) in kinds.items():
        where = f"{name} ({type(module).__name__})"
        if any(base.__module__.startswith("transformer_engine.") for base in type(module).__mro__):
            raise ConfigError(
                f"tp.overlap: {where} is a layer of Transformer Engine, which communicates by itself; "
                f"use Megatron-core's own"
            )
        if kind and module.sequence_parallel:
            raise ConfigError(
                f"tp.overlap: {where} has sequence_parallel=True, which is not supported; set it to False"
            )
        if kind and module.explicit_expert_comm:
            raise ConfigError(
                f"tp.overlap: {where} belongs to an expert, whose tokens are not a batch; leave experts out"
            )
        if kind:
            travel.check(module.tp_group, where)
    return [
        hook
        for name, (module, kind) in kinds.items()
        if kind
        for hook in (_hook_column if kind == COLUMN else _hook_row)(name or kind, module, travel)
    ]


def _kind(module: nn.Module) -> str | None:
    bases = (base for base in type(module).__mro__ if base.__module__.startswith("megatron.core."))
    return next((base.__name__ for base in bases if base.__name__ in (COLUMN, ROW)), None)


class Attributes:
    """Attributes of a layer, changed during its forward."""

    def __init__(self, module: Any, kind: str) -> None:
        self._module, self._changed = module, LEFT_OUT[kind]
        self.kept: dict[str, Any] = {}
        """What they were; empty: they are not changed."""

    def change(self) -> None:
        self.kept = {name: getattr(self._module, name) for name in self._changed}
        vars(self._module).update(self._changed)

    def restore(self) -> dict[str, Any]:
        """What they were, and are again."""
        kept, self.kept = self.kept, {}
        vars(self._module).update(kept)
        return kept


def _hook_column(name: str, module: Any, travel: Travel) -> list[RemovableHandle]:
    attributes = Attributes(module, COLUMN)

    def enter(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        part = current_part()
        if part is None or not arguments or module.disable_grad_reduce:  # as Megatron's adapters: reduced elsewhere
            return None
        if not (arguments[0].requires_grad and torch.is_grad_enabled()):
            return None
        attributes.change()
        return entered(part, arguments[0], travel, module.tp_group, name), *arguments[1:]

    def leave(*_: Any) -> None:
        attributes.restore()

    return [
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True),
    ]


def _hook_row(name: str, module: Any, travel: Travel) -> list[RemovableHandle]:
    attributes = Attributes(module, ROW)

    def enter(_: nn.Module, __: Any) -> None:
        if current_part() is not None:
            attributes.change()

    def leave(_: nn.Module, __: Any, output: tuple[Tensor, Tensor | None] | None) -> Any:
        kept, part = attributes.restore(), current_part()
        if not kept or output is None or part is None:  # it failed, or no batch is split
            return None
        values, bias = output
        reduced: Tensor = Sum.apply(values, travel, module.tp_group, name)  # type: ignore[no-untyped-call]
        part.pass_turn(f"{name} ({ROW})")
        if kept["skip_bias_add"]:
            return reduced, bias
        return (reduced if bias is None else reduced + bias), None

    return [
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True),
    ]
