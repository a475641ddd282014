"""The column and row layers of tensor parallelism in a batch whose parts take turns (parts.py).

A row layer starts its all-reduce, and passes the turn. In the backward pass, the all-reduce of a column layer's input
gradient runs while autograd works on the other parts: three autograd functions replace that of DTensor, which waits.

Autograd runs the ready operation with the highest number, the latest one. So this part's backward pass would wait for
its all-reduce at once. Therefore the wait gets the number at which the following part last entered a column layer: the
operations of that part up to its own all-reduce have higher numbers, and come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from ...errors import ConfigError
from ..work.context import priority
from .parts import Part, current_part
from .sequence import ReplacedHook, gathered, scattered, sequence_arguments
from .travel import LATENCY_CLASS, Group, Travel


class Arrive(torch.autograd.Function):
    """The same values; the backward pass waits for the all-reduce of `Reduce`."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.wait() if isinstance(gradient, funcol.AsyncCollectiveTensor) else gradient


class Reduce(torch.autograd.Function):
    """The same values; the backward pass starts the all-reduce of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, travel: Travel, group: Group, layer: str) -> Tensor:
        ctx.travel, ctx.group, ctx.layer = travel, group, layer
        return values.view_as(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        with priority(LATENCY_CLASS):
            summed = ctx.travel.all_reduce(gradient.contiguous(), ctx.group, ctx.layer, "backward")
        return summed, None, None, None


class Sum(torch.autograd.Function):
    """Starts the sum over all ranks; the backward pass returns the same gradient."""

    @staticmethod
    def forward(_: Any, values: Tensor, travel: Travel, group: Group, layer: str) -> Tensor:
        return travel.all_reduce(values, group, layer, "forward")

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


class Replicated(torch.autograd.Function):
    """A tensor that all ranks have, as DTensor; the backward pass returns this rank's part of its gradient's sum."""

    @staticmethod
    def forward(_: Any, values: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(values, mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(_: Any, gradient: DTensor) -> tuple[Tensor, None]:
        if not gradient.placements[0].is_partial():
            raise ConfigError(
                f"tp.overlap: the input of a column layer has a gradient of {gradient.placements}, no sum"
            )
        return gradient.to_local(), None


def entered(part: Part, values: Tensor, travel: Travel, group: Group, layer: str) -> Tensor:
    """The input of a column layer, whose gradient is reduced asynchronously.

    Layers in a row with the same input, as q, k and v, share one all-reduce: that of the first one.
    """
    part.enter()
    if part.entry is not None and part.entry[0] is values and part.entry[1] == values._version:
        return part.entry[2]
    arrived = Arrive.apply(values)  # type: ignore[no-untyped-call]
    arrived.grad_fn._set_sequence_nr(part.next_entered_at() - 1)
    reduced: Tensor = Reduce.apply(arrived, travel, group, layer)  # type: ignore[no-untyped-call]
    part.entry = values, values._version, reduced
    return reduced


# ---- layers after parallelize_module --------------------------------------------------------------------------------


def hook_layers(root: nn.Module, travel: Travel) -> list[Any]:
    """Hooks of all layers after parallelize_module. Raises ConfigError for styles that cannot be split."""
    hooks: list[Any] = []
    prepared: set[nn.Module] = set()
    try:
        for name, module in root.named_modules():
            where = name or type(module).__name__
            for key, hook in list(module._forward_pre_hooks.items()):
                found = dict(_variables(hook))
                if isinstance(found.get("self"), PrepareModuleInput):
                    replaced = _hook_module(where, module, key, found, travel)
                    if replaced is not None:
                        hooks.append(replaced)
                        prepared.update(module.modules())
            if getattr(module, "_distribute_module_applied", False):
                hooks += _hook_layer(where, module, travel, is_prepared=module in prepared)
    except ConfigError:
        for hook in hooks:
            hook.remove()
        raise
    return hooks


def _hook_module(name: str, module: nn.Module, key: int, found: dict[str, Any], travel: Travel) -> ReplacedHook | None:
    """Replaces the hook of PrepareModuleInput, if that gathers sequences: its exchange ends a turn, too."""
    style, mesh = found["self"], found["device_mesh"]
    places = sequence_arguments(style)
    if not places:
        return None
    where = f"{name} ({type(module).__name__})"
    travel.check((mesh, 0), where)
    original = module._forward_pre_hooks[key]

    def prepare(_: nn.Module, arguments: tuple[Any, ...], *rest: Any) -> Any:
        part = current_part()
        if part is None or len(arguments) != len(style.input_layouts):
            return original(module, arguments, *rest)
        values = list(arguments)
        for i in places:
            whole = gathered(part, values[i], mesh, style.input_layouts[i], travel, name, where)
            values[i] = Replicated.apply(whole, mesh)  # type: ignore[no-untyped-call]
        for i, layout in enumerate(style.input_layouts):
            if i not in places:
                values[i] = style._prepare_input_arg(values[i], mesh, layout, style.desired_input_layouts[i])
        return (tuple(values), *rest) if rest else tuple(values)

    return ReplacedHook(module, key, prepare)


def _hook_layer(name: str, module: nn.Module, travel: Travel, *, is_prepared: bool) -> list[Any]:
    if _is_sequence_parallel(module):
        return []  # nothing travels
    key, prepare, finish, mesh = _style(name, module)
    where = f"{name} ({type(module).__name__})"
    given, returned = prepare.args[0], finish.args[0]
    is_column, is_embedding = prepare.func is ColwiseParallel._prepare_input_fn, isinstance(module, nn.Embedding)
    takes = [(Replicate(),)] if is_column or is_embedding else [(Shard(-1),)]
    returns = [(Replicate(),), *([(Shard(-1),)] if is_column else [])]
    if not (given in takes or (is_column and not is_embedding and _is_sequence(given))) or not (
        returned in returns or (not is_column and _is_sequence(returned))
    ):
        raise ConfigError(
            f"tp.overlap: {where} has input_layouts={_text(given)} and output_layouts={_text(returned)}; leave the "
            f"layouts of ColwiseParallel and RowwiseParallel at their defaults, or give those of sequence parallelism: "
            f"Shard(1) as input of columns and output of rows"
        )
    travel.check((mesh, 0), where)
    original = module._forward_pre_hooks[key]

    def enter(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        part, values = current_part(), arguments[0] if arguments else None
        if part is None or not isinstance(values, Tensor) or not (values.requires_grad and torch.is_grad_enabled()):
            return None
        if isinstance(values, DTensor):
            if is_prepared:
                return None
            raise ConfigError(f"tp.overlap: {where} is given a DTensor; leave PrepareModuleInput out")
        wrapped = Replicated.apply(entered(part, values, travel, (mesh, 0), name), mesh)  # type: ignore[no-untyped-call]
        return wrapped, *arguments[1:]

    def gather(_: nn.Module, arguments: tuple[Any, ...]) -> Any:
        part = current_part()
        if part is None:
            return original(module, arguments)
        whole = gathered(part, arguments[0], mesh, given[0], travel, name, where)
        return Replicated.apply(whole, mesh)  # type: ignore[no-untyped-call]

    def add_up(_: nn.Module, __: Any, output: DTensor) -> DTensor | None:
        part = current_part()
        if part is None or output.placements != (Partial(),):  # else DTensor does it, or nobody
            return None
        if _is_sequence(returned):
            return scattered(part, output, returned[0], travel, name, where)
        if travel.codec == "none":
            return None
        summed = Sum.apply(output.to_local(), travel, (mesh, 0), name)  # type: ignore[no-untyped-call]
        return DTensor.from_local(summed, mesh, (Replicate(),), run_check=False)

    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        part = current_part()
        if part is not None:
            part.pass_turn(where)

    hooks: list[Any] = []
    if is_column and _is_sequence(given):
        hooks.append(ReplacedHook(module, key, gather))
    elif is_column:
        hooks.append(module.register_forward_pre_hook(enter, prepend=True))
    if not is_column:
        hooks.append(module.register_forward_hook(add_up, prepend=True))
    if returned == (Replicate(),) or (is_embedding and not is_column):
        hooks.append(module.register_forward_hook(leave))
    return hooks


def _is_sequence(layouts: tuple[Placement, ...]) -> bool:
    """Whether this is the layout of a sequence in parts."""
    return len(layouts) == 1 and isinstance(layouts[0], Shard) and layouts[0].dim >= 0


def _is_sequence_parallel(module: nn.Module) -> bool:
    for hook in module._forward_pre_hooks.values():
        prepare = dict(_variables(hook)).get("input_fn")
        if getattr(prepare, "func", None) == SequenceParallel._prepare_input_fn:
            return True
    return False


def _style(name: str, module: nn.Module) -> tuple[int, Any, Any, DeviceMesh]:
    """The key of the style's pre-hook, its functions for input and output, with their arguments, and its mesh."""
    known = (ColwiseParallel, RowwiseParallel)
    found: dict[str, Any] = {}
    key = -1
    for number, hook in [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]:
        variables = dict(_variables(hook))
        key = number if "input_fn" in variables else key
        found.update(variables)
    prepare, finish = found.get("input_fn"), found.get("output_fn")
    if (
        not isinstance(module, (nn.Linear, nn.Embedding))
        or getattr(prepare, "func", None) not in [style._prepare_input_fn for style in known]
        or getattr(finish, "func", None) not in [style._prepare_output_fn for style in known]
    ):
        raise ConfigError(
            f"tp.overlap: {name} ({type(module).__name__}) is parallel, but is no Linear or Embedding with "
            f"ColwiseParallel or RowwiseParallel; leave your own styles out"
        )
    return key, prepare, finish, found["device_mesh"]


def _variables(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Variables of the function around this one."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True) if code and cells else iter(())


def _text(layouts: tuple[Placement, ...]) -> str:
    return ", ".join(repr(layout) for layout in layouts)
