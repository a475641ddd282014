"""Guarded parameters: whatever reads or changes one first calls a function, which makes the step it waits for.

While a parameter is guarded its class is a subclass of its own, whose `__torch_function__` sees each operation of
Python that takes the parameter. Operations on other tensors cost nothing. Memory that something else holds too, as a
view, can be read without the parameter: `others_hold` tells, so that such a parameter is not guarded.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def _accessors(*names: str) -> frozenset[Any]:
    """Getters, and setters where they exist, of attributes of tensors."""
    found = [getattr(torch.Tensor, name) for name in names]
    return frozenset(
        getattr(descriptor, kind)
        for descriptor in found
        for kind in ("__get__", "__set__", "__delete__")
        if hasattr(descriptor, kind)
    )


METADATA = _accessors(
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "_version"
) | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.storage_offset,
    torch.Tensor.is_floating_point,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.is_floating_point,
}
"""Functions that take a parameter without reading its values."""


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()))


class Guarded:
    """Stands before the class of a guarded parameter, in its subclass."""

    _before_use: Callable[[Tensor], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            for tensor in tensors_in((args, kwargs)):
                if isinstance(tensor, Guarded):  # the step of another one may have been its own, too
                    tensor._before_use(tensor)
            if not any(isinstance(tensor, Guarded) for tensor in tensors_in((args, kwargs))):
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]  # that of the parameter

    # These ask for the class before they read the values.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_unguarded(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unguarded(self).__reduce_ex__(protocol)


def guard(parameter: Tensor, before_use: Callable[[Tensor], None]) -> None:
    """Calls `before_use`, which calls `unguard` or raises, before the parameter is read or changed."""
    parameter.__class__ = _guarded(type(parameter))
    parameter._before_use = before_use  # type: ignore[attr-defined]


def unguard(parameter: Tensor) -> None:
    """Gives the parameter its own class again, if it is guarded."""
    if isinstance(parameter, Guarded):
        del parameter._before_use
        parameter.__class__ = type(parameter).__mro__[2]


def _unguarded(parameter: Any) -> Tensor:
    parameter._before_use(parameter)
    unguard(parameter)  # in the middle of a step
    return parameter  # type: ignore[no-any-return]


@functools.cache
def _guarded(kind: type[Tensor]) -> type[Tensor]:
    return type(f"Guarded{kind.__name__}", (Guarded, kind), {})


def others_hold(parameters: Iterable[Tensor], known: Collection[Tensor]) -> set[Tensor]:
    """Those of `parameters` whose memory is held by a tensor that is not one of `known`, or overlaps another of these.

    Such a tensor may be a view, `.data` or `detach()` from before, or an array of NumPy.
    """
    storages = Counter(_storage(tensor) for tensor in known if _has_storage(tensor))
    found = set()
    for parameter in parameters:
        if _has_storage(parameter) and _holders(parameter) > storages[_storage(parameter)]:
            found.add(parameter)
        elif _has_storage(parameter) and storages[_storage(parameter)] > 1:
            low, high = _range(parameter)
            others = (
                _range(other) for other in known if other is not parameter and _storage(other) == _storage(parameter)
            )
            if any(start < high and low < end for start, end in others):
                found.add(parameter)
    return found


def _has_storage(parameter: Tensor) -> bool:
    """Whether the memory is the parameter's own. A DTensor's is that of the tensor within, which FSDP2 holds, too."""
    return parameter.layout is torch.strided and not hasattr(parameter, "placements")


def _storage(parameter: Tensor) -> int:
    return int(parameter.untyped_storage()._cdata)


def _holders(parameter: Tensor) -> int:
    """The tensors that hold the parameter's memory."""
    return int(torch._C._storage_Use_Count(_storage(parameter))) - _OF_PYTHON


def _range(parameter: Tensor) -> tuple[int, int]:
    """The first byte of the parameter in its storage, and the one after its last."""
    first = parameter.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    width = parameter.element_size()
    return int(first) * width, int(last + 1) * width


_OF_PYTHON = 0
_OF_PYTHON = _holders(torch.empty(1, dtype=torch.float32, device="cpu")) - 1
"""Holders that come from asking."""
