"""Arguments of the process group's overloads, in one form."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor

OptionsT = TypeVar("OptionsT")


def as_list(tensors: Any) -> list[Tensor]:
    """The tensors of a call that takes one or several."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def options_of(kind: type[OptionsT], given: Any, timeout: timedelta | None = None) -> OptionsT:
    """The options of a call: `given` itself, or made of the arguments of torch's other overloads."""
    if isinstance(given, kind):
        return given
    options: Any = kind()
    if isinstance(given, timedelta):
        options.timeout = given
    elif isinstance(given, int):
        options.rootRank = given
    elif given is not None:
        options.reduceOp = given
    if timeout is not None:
        options.timeout = timeout
    return options  # type: ignore[no-any-return]
