"""`settled`: arguments of a collective, with the results of functional collectives that they take waited for.

Those are `AsyncCollectiveTensor`s, which wrap the tensor that an operation in flight writes. torch's own groups get the
tensor within from the dispatcher, which a process group in Python does not pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

ArgsT = TypeVar("ArgsT")


class UnsettledError(Exception):
    """An argument must be waited for. Nothing has started: the operation can start with `settled` arguments."""


def is_settled(leaves: Iterable[Any]) -> bool:
    """Whether none of these arguments must be waited for."""
    return not any(map(_is_in_flight, leaves))


def settled(args: ArgsT) -> ArgsT:
    """The same arguments, with the tensors within; waits for them. Raises the errors of their operations."""
    found: ArgsT = pytree.tree_map(lambda leaf: leaf.trigger_wait() if _is_in_flight(leaf) else leaf, args)
    return found


def _is_in_flight(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and hasattr(type(leaf), "trigger_wait")  # its module may not be imported yet
