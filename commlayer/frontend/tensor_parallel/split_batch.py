"""`SplitBatch`: a module whose forward splits the batch in parts, which take turns (parts.py).

Each part runs the module's own forward until it has started the all-reduce of a row layer. In the backward pass, the
all-reduces of the column layers run while autograd works on the other parts (layers.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...dynamo import untraced
from ...errors import ConfigError
from ..gradients.fsdp import sharded_modules
from ..overlap.handle import is_compiled
from ..work.context import priority
from .layers import hook_layers
from .megatron import hook_megatron
from .parts import current_part, take_turns
from .travel import LATENCY_CLASS, WHO, LayerError, Travel

_split: WeakSet[nn.Module] = WeakSet()
"""All modules of layers whose batches are split."""


@untraced
class SplitBatch:
    """What `commlayer.tp.overlap` returns."""

    def __init__(self, layers: nn.Module, parts: int, dim: int, split: Sequence[str] | None, codec: str) -> None:
        if type(parts) is not int or parts < 1:
            raise ConfigError(f"{WHO}(parts={parts!r}): use a whole number from 1, as 2")
        self._travel = Travel(codec)
        _check_installation()
        _check_layers(layers)
        self._layers, self._parts, self._dim, self._split = layers, parts, dim, split
        self._signature = inspect.signature(layers.forward)
        unknown = [name for name in split or () if name not in self._signature.parameters]
        if unknown:
            raise ConfigError(f"{WHO}(split={split!r}): {type(layers).__name__}.forward has no argument {unknown[0]!r}")
        self._hooks = hook_layers(layers, self._travel)
        try:
            self._hooks += hook_megatron(layers, self._travel)
        except ConfigError:
            for hook in self._hooks:
                hook.remove()
            raise
        if not self._hooks:
            raise ConfigError(
                f"{WHO}({type(layers).__name__}): it has no column and row layers; call parallelize_module "
                f"first, or give layers of Megatron-core"
            )
        self._kind = type(layers)
        layers.__class__ = self._splitting_kind()
        _split.update(layers.modules())

    def remove(self) -> None:
        """Ends the overlap: batches are not split any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        _split.difference_update(self._layers.modules())
        if type(self._layers).__bases__ == (self._kind,):  # else it became another class since, by fully_shard
            self._layers.__class__ = self._kind

    def measured(self) -> contextlib.AbstractContextManager[dict[str, LayerError]]:
        """Within this context, a pass of the layers also shows the errors of their codec, as a dict by layer.

            with handle.measured() as errors:
                loss_of(model(inputs), targets).backward()
            errors["layers.3.down"].forward  # 0.006: the norm of the rounding, relative to that of the output

        The values are those with the codec. Every exchange travels twice, the second time as it is, and is waited for
        at once: use it for single steps. All ranks use it alike; their errors are equal. A layer whose values travel as
        they are is missing, so without a codec the dict stays empty.
        """
        return self._travel.measured()

    def __enter__(self) -> SplitBatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.remove()

    def _splitting_kind(self) -> type[nn.Module]:
        """The class of the layers, with a forward that splits. Copies of the layers do not split."""
        kind = self._kind

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not self._layers or not self._hooks or current_part() is not None:
                return kind.forward(module, *args, **kwargs)
            return self._run(functools.partial(kind.forward, module), args, kwargs)

        return type(kind.__name__, (kind,), {"forward": untraced(forward), "__module__": kind.__module__})

    def _run(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass of all parts."""
        _check_context()
        bound = self._signature.bind(*args, **kwargs)
        names = self._names(bound)
        size = self._batch_size(bound, names)
        if size % self._parts:
            if not torch.is_grad_enabled():
                return run(*args, **kwargs)  # the last batch of an evaluation
            raise ConfigError(
                f"{WHO}: a batch of {size} cannot be split in {self._parts} equal parts; use drop_last=True or another "
                f"batch size"
            )
        calls = self._split_calls(bound, names)
        with priority(LATENCY_CLASS):
            results = take_turns([functools.partial(run, *call.args, **call.kwargs) for call in calls])
        return self._joined(results, size // self._parts)

    def _names(self, bound: inspect.BoundArguments) -> list[str]:
        """The arguments to split."""
        given = [name for name, value in bound.arguments.items() if _tensors(value)]
        names = given[:1] if self._split is None else [name for name in given if name in self._split]
        if not names:
            raise ConfigError(f"{WHO}: {type(self._layers).__name__} was called without a tensor to split")
        return names

    def _batch_size(self, bound: inspect.BoundArguments, names: list[str]) -> int:
        """The size of the batch. Raises ConfigError if it is not clear which arguments are to be split."""
        dim = self._dim
        for name in names:
            for tensor in _tensors(bound.arguments[name]):
                if tensor.dim() <= dim:
                    raise ConfigError(
                        f"{WHO}(dim={dim}): {name} has shape {tuple(tensor.shape)}, without dimension {dim}; name the "
                        f"arguments that are a batch, as split={names}"
                    )
        sizes = {tensor.shape[dim] for name in names for tensor in _tensors(bound.arguments[name])}
        if len(sizes) > 1:
            raise ConfigError(
                f"{WHO}: {', '.join(names)} have {sorted(sizes)} samples in dimension {dim}; give as many"
            )
        (size,) = sizes
        for name, value in bound.arguments.items():
            shapes = [tensor.shape for tensor in _tensors(value) if tensor.dim() > dim and tensor.shape[dim] == size]
            if self._split is None and name not in names and shapes:
                raise ConfigError(
                    f"{WHO}: {name} of shape {tuple(shapes[0])} may be a batch, too; name the arguments that are to be "
                    f"split, as split={[*names, name]}, or only {names}"
                )
        return size

    def _split_calls(self, bound: inspect.BoundArguments, names: list[str]) -> list[inspect.BoundArguments]:
        """The arguments of each part."""
        calls = [
            inspect.BoundArguments(self._signature, type(bound.arguments)(bound.arguments)) for _ in range(self._parts)
        ]
        for name in names:
            leaves, form = tree_flatten(bound.arguments[name])
            pieces = [
                leaf.chunk(self._parts, self._dim) if isinstance(leaf, Tensor) else [leaf] * self._parts
                for leaf in leaves
            ]
            for call, values in zip(calls, zip(*pieces, strict=True), strict=True):
                call.arguments[name] = tree_unflatten(list(values), form)
        return calls

    def _joined(self, results: list[Any], size: int) -> Any:
        """One result of all parts' results, each of `size` samples."""
        leaves, forms = zip(*(tree_flatten(result) for result in results), strict=True)
        if any(form != forms[0] for form in forms):
            raise ConfigError(f"{WHO}: the parts returned different structures: {forms[0]} and {forms[1]}")
        return tree_unflatten([self._joined_leaf(leaf, size) for leaf in zip(*leaves, strict=True)], forms[0])

    def _joined_leaf(self, values: tuple[Any, ...], size: int) -> Any:
        who = f"{WHO}: {type(self._layers).__name__} returned"
        first = values[0]
        if isinstance(first, Tensor):
            if any(value.dim() <= self._dim or value.shape[self._dim] != size for value in values):
                raise ConfigError(
                    f"{who} a tensor of shape {tuple(first.shape)} for {size} samples in dimension {self._dim}; give "
                    f"layers that treat each sample alone: without the loss, for example"
                )
            return torch.cat(values, self._dim)
        if any(value != first for value in values):
            raise ConfigError(
                f"{who} {first!r} for one part and {values[1]!r} for another; it may return tensors and constants"
            )
        return first


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _check_installation() -> None:
    """Raises ConfigError for a missing greenlet, and a torch that cannot order the backward pass."""
    if importlib.util.find_spec("greenlet") is None:
        raise ConfigError(f"{WHO} needs greenlet: pip install greenlet")
    node = torch.ones(1, requires_grad=True, dtype=torch.float32, device="cpu").view(1).grad_fn
    if not hasattr(node, "_set_sequence_nr"):
        raise ConfigError(f"{WHO}: torch {torch.__version__} has no _set_sequence_nr; use torch 2.11 to 2.15")


def _check_layers(layers: nn.Module) -> None:
    """Raises ConfigError for modules that cannot be split, or whose results would change."""
    who = f"{WHO}({type(layers).__name__})"
    if "forward" in vars(layers) or type(layers).forward is nn.Module.forward:
        raise ConfigError(f"{who}: it has no forward of its class; give the module that calls the layers, as the model")
    if any(module in _split for module in layers.modules()):
        raise ConfigError(f"{who}: another {WHO} has it, or a part of it; call remove() there first")
    if any(is_compiled(module) for module in layers.modules()):
        raise ConfigError(f"{who}: a part of it is compiled, and hooks do not run there; leave torch.compile out")
    for name, module in layers.named_modules():
        where = f"{name or 'it'} ({type(module).__name__})"
        if hasattr(module, "_checkpoint_wrapped_module"):
            raise ConfigError(f"{who}: {where} is checkpointed; leave checkpoint out: its second forward has no parts")
        if isinstance(module, _BatchNorm):
            raise ConfigError(f"{who}: the statistics of {where} would be those of a part; use another normalisation")
    inner = [module for module in sharded_modules(layers) if module is not layers]
    if inner:
        raise ConfigError(
            f"{who}: {type(inner[0]).__name__} is sharded by fully_shard, and frees its weights while another part "
            f"needs them; call fully_shard only for the module given to {WHO}, or for one around it"
        )
    dropped = [
        name
        for name, module in layers.named_modules()
        if getattr(module, "p", 0.0) and "Dropout" in type(module).__name__
    ]
    if dropped:
        warnings.warn(
            f"{who}: {', '.join(dropped[:3])} draw their masks part by part: other ones than without the split, as "
            f"with another seed",
            stacklevel=5,
        )


def _check_context() -> None:
    """Raises ConfigError if a checkpoint calls the layers."""
    saved = torch._C._autograd._top_saved_tensors_default_hooks(True)
    is_checkpoint = saved is not None and getattr(saved[0], "__module__", "") == "torch.utils.checkpoint"
    if is_checkpoint or torch._C._current_graph_task_id() != -1:
        raise ConfigError(
            f"{WHO}: a checkpoint calls the layers, and would call them again in the backward pass; leave it out"
        )
