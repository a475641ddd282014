"""Error feedback for losses: what of a gradient was not counted in one step is added to it in the next.

After Seide et al. ("1-Bit Stochastic Gradient Descent", Interspeech 2014), where quantisation loses a part; here the
network does, and the engine says which one. Kept by parameter, since DDP may regroup its buckets at any time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor


class Residual:
    """What has not been counted yet, as a few stretches of some parameters' gradients."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, list[tuple[int, Tensor]]] = {}

    def add_to(self, buffer: Tensor, parameters: Sequence[Tensor], starts: Sequence[int]) -> None:
        """Adds what is kept for these parameters to a flat buffer of their gradients, and forgets it.

        starts[i] is the element of `buffer` where the gradient of parameters[i] begins, ascending.
        """
        for parameter, start in zip(parameters, starts, strict=True):
            for offset, values in self._kept.pop(parameter, ()):
                buffer[start + offset : start + offset + len(values)].add_(values)

    def keep(
        self, buffer: Tensor, parameters: Sequence[Tensor], starts: Sequence[int], missing: Sequence[tuple[int, int]]
    ) -> None:
        """Keeps the parts of `buffer` that were not counted: (offset, length) in bytes. Infinities and NaN are not
        worth keeping: the step that made them is skipped, or lost anyway."""
        for offset, length in missing:
            at, end = offset // buffer.itemsize, (offset + length) // buffer.itemsize
            while at < end:
                index = bisect_right(starts, at) - 1
                until = min(end, starts[index + 1]) if index + 1 < len(starts) else end
                values = torch.nan_to_num(buffer[at:until], nan=0.0, posinf=0.0, neginf=0.0)
                self._kept.setdefault(parameters[index], []).append((at - starts[index], values))
                at = until

    def total(self, parameter: Tensor) -> Tensor:
        """What is kept for one parameter, as a tensor of its shape."""
        flat = torch.zeros(parameter.numel(), dtype=parameter.dtype)
        for offset, values in self._kept.get(parameter, ()):
            flat[offset : offset + len(values)] += values.to(flat.dtype)
        return flat.view(parameter.shape)


def largest_blocks(values: Tensor, share: float, block_bytes: int) -> Tensor:
    """A map, one bit per block of `block_bytes` in words of 64: the `share` of blocks with the largest elements.

    `values` is flat; the last block may be shorter.
    """
    each = block_bytes // values.itemsize
    whole = values.numel() // each
    magnitude = torch.linalg.vector_norm(values[: whole * each].view(whole, each).float(), torch.inf, dim=1)
    if whole * each < values.numel():
        rest = values[whole * each :].float().abs().amax()
        magnitude = torch.cat([magnitude, rest.view(1)])
    chosen = magnitude.topk(round(share * len(magnitude))).indices
    bits = torch.zeros(-(-len(magnitude) // 64) * 64, dtype=torch.int64)
    bits[chosen] = 1
    return (bits.view(-1, 64) << torch.arange(64)).sum(1)
