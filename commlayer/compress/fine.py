"""`Fine`: the parameters whose gradients travel in 16 bits, whatever the codec.

Biases, norms, embeddings and the head are few values with much influence. Other systems leave them exact, too (CGX,
Markov et al., Middleware 2022; PowerSGD, Vogels et al., NeurIPS 2019).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError

PATTERNS = ("*norm*", "*.ln*", "ln*", "*embed*", "*wte*", "*wpe*", "*head*", "*.classifier*", "classifier*")
"""Names of parameters that travel in 16 bits by default; those of one dimension always do."""

GAP_LEAST = 1 << 14
"""A stretch of so many fine values in a row splits the buffer; shorter ones are cheaper to send twice."""


class Fine:
    """Selects parameters by name: those that match one of the patterns (as of file names), and all of one dimension.

    `model` is the model of the HookState, wrapped in DistributedDataParallel or not; None: names are not known, only
    parameters of one dimension are fine. Raises ConfigError for a model of another type, and for a pattern that is no
    text.
    """

    def __init__(self, model: nn.Module | None = None, patterns: Sequence[str] = PATTERNS) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(f"Fine(model={model!r}): give the model that gets the hook, an nn.Module")
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError(f"Fine(patterns={patterns!r}): use a list of patterns of names, as ['*norm*', '*head*']")
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        named = [] if plain is None else plain.named_parameters()
        self._named = {each for name, each in named if any(fnmatch.fnmatchcase(name, one) for one in patterns)}

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter.dim() < 2 or parameter in self._named


class Cut(NamedTuple):
    """A buffer of gradients by precision; (start, end) in elements, ascending."""

    coarse: list[tuple[int, int]]
    """Stretches for the codec. They contain short fine ones, which are sent as zeros."""
    fine: list[tuple[int, int]]
    """Stretches for 16 bits."""


def cut(parameters: Sequence[Tensor], starts: Sequence[int], size: int, fine: Fine) -> Cut:
    """Cuts a buffer of `size` elements, where the gradient of parameters[i] begins at starts[i], ascending."""
    stretches: list[tuple[int, int]] = []
    for parameter, start in zip(parameters, starts, strict=True):
        if parameter in fine:
            joins = bool(stretches) and stretches[-1][1] == start
            begin = stretches.pop()[0] if joins else start
            stretches.append((begin, start + parameter.numel()))
    coarse, at = [], 0
    for start, end in [*(each for each in stretches if each[1] - each[0] >= GAP_LEAST), (size, size)]:
        if start > at and (at, start) not in stretches:
            coarse.append((at, start))
        at = end
    return Cut(coarse, stretches)
