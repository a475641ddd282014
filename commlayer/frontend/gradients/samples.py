"""`weight_of`: the weight of this rank's gradients in a step, by the samples of all ranks.

Rank r has the mean gradient g_r of its n_r samples. The mean over all samples is sum(n_r g_r) / sum(n_r), which is the
plain average of w_r g_r with w_r = n_r * ranks / sum(n_r). So the gradient is multiplied once, before anything is
encoded, and the average stays as it is.

A residual e_r keeps the weight of its own step: a step sends s_r = w_r g_r + e_r - e_r', and what it leaves, e_r', is
added to the next one without another factor. The sum of all s_r over the steps is then the sum of all w_r g_r, but for
the last residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import number
from ...errors import ConfigError
from ..work.context import AHEAD, labelled, priority
from .hook_group import largest_of

COUNT_MAX = float(2**53)
"""Larger whole numbers are not all floats."""
TEXT_BYTES = 80
"""So much of a value that is no count, other ranks quote."""


def weight_of(samples: Callable[[], float], group: dist.ProcessGroup, device: torch.device | str = "cpu") -> float:
    """n_r * ranks / sum(n): exactly 1 with equal counts, and 0 without samples. All ranks of the group call.

    `device` is that of the exchange. Raises ConfigError, with the same text on all ranks, if a count is not a number
    from 0 to COUNT_MAX, and if all are 0. `samples` may raise, too: that is an error of the same kind.
    """
    cause: Exception | None = None
    try:
        given: object = samples()
        text = repr(given)
    except Exception as error:
        given, cause, text = None, error, f"raised {error!r}"
    count = number(given)
    is_count = 0 <= count <= COUNT_MAX
    size, rank = group.size(), group.rank()
    with priority(AHEAD), labelled("samples"):
        counts = largest_of(group, _at(rank, [count if is_count else -1.0], size), device)
        wrong = [place for place, found in enumerate(counts) if found < 0]
        if wrong:
            quoted = [float(byte) for byte in text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)]
            codes = largest_of(group, _at(rank, quoted, size), device)
    if wrong:
        start = wrong[0] * TEXT_BYTES
        text = bytes(map(int, codes[start : start + TEXT_BYTES])).decode(errors="replace").rstrip()
        raise ConfigError(
            f"HookState(samples=...) of rank {_name(group, wrong[0])}: {text}; return the number of this rank's "
            f"samples in the step, from 0 to 2**53, as len(batch) or int(mask.sum())"
        ) from cause
    total = math.fsum(counts)
    if total == 0:
        raise ConfigError(
            f"HookState(samples=...): all ranks ({', '.join(_name(group, place) for place in range(size))}) returned "
            f"0 in the same step, which has no average; leave out steps without samples on all ranks"
        )
    return counts[rank] * size / total


def weigh(gradients: Tensor, weight: float) -> None:
    """Multiplies in place. Without samples the gradients become 0, also where the mean of no samples is NaN."""
    if weight == 0:
        gradients.zero_()
    elif weight != 1:
        gradients.mul_(weight)


def _at(rank: int, own: list[float], size: int) -> list[float]:
    """Values of all ranks, of which only this rank's are known."""
    unknown = [-math.inf] * len(own)
    return [*unknown * rank, *own, *unknown * (size - rank - 1)]


def _name(group: dist.ProcessGroup, rank: int) -> str:
    return str(dist.get_global_rank(group, rank))
