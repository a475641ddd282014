"""`extents`: where the gradients of parameters lie in a flat buffer, perhaps only in part."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def extents(parameters: Sequence[Tensor], starts: Sequence[int], size: int) -> list[tuple[int, int]]:
    """(start, end) of each parameter's gradient in a buffer of `size` elements.

    starts[i] is the element where the gradient of parameters[i] begins, ascending; below 0 if the buffer begins within
    it. What lies outside of the buffer is cut off.
    """
    return [
        (max(0, start), min(size, start + parameter.numel()))
        for parameter, start in zip(parameters, starts, strict=True)
    ]
