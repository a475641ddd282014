"""`Fine`: the parameters whose gradients travel in 16 bits, whatever the codec.

Biases, norms, embeddings and the head have much influence. Other systems leave biases and norms uncompressed, too (CGX,
Markov et al., Middleware 2022; PowerSGD, Vogels et al., NeurIPS 2019).
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError
from .extent import extents

PATTERNS = ("*norm*", "*embed*", "*wte*", "*wpe*", "head.*", "*.head.*", "*lm_head*", "classifier*", "*.classifier*")
"""Names of parameters that travel in 16 bits by default; those with fewer than two dimensions always do. PowerSGD
and top-k compress the matrices among them."""

GAP_LEAST = 1 << 14
"""A fine stretch of at least this many values splits the buffer. Shorter ones stay in it as zeros: a few bytes cost
less than another operation."""


class Fine:
    """Selects parameters by name: those that match one of the patterns (with the wildcards of file names), and all with
    fewer than two dimensions.

    `model` is the model of the HookState, wrapped in DistributedDataParallel or not. None: names are not known, only
    parameters with fewer than two dimensions are fine. `patterns` None: PATTERNS. A parameter with several names, as of
    tied weights, is fine if one of them matches.

    Raises ConfigError for arguments of another type, for patterns without a model, and for a pattern of the caller's
    that matches no parameter.
    """

    def __init__(self, model: nn.Module | None = None, patterns: Sequence[str] | None = None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(f"Fine(model={model!r}): give the model that gets the hook, an nn.Module")
        given = PATTERNS if patterns is None else patterns
        if not isinstance(given, (list, tuple)) or not all(isinstance(pattern, str) for pattern in given):
            raise ConfigError(f"Fine(patterns={patterns!r}): use a list of patterns of names, as ['*norm*', '*head*']")
        if patterns is not None and model is None:
            raise ConfigError(
                f"Fine(patterns={patterns!r}): patterns need the model whose names they match: Fine(model)"
            )
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        named = [] if plain is None else list(plain.named_parameters(remove_duplicate=False))
        matching = {one: {parameter for name, parameter in named if fnmatch.fnmatchcase(name, one)} for one in given}
        unmatched = [pattern for pattern, found in matching.items() if patterns is not None and not found]
        if unmatched:
            raise ConfigError(
                f"Fine: {', '.join(map(repr, unmatched))} matches no parameter's name; use names as "
                f"model.named_parameters() gives them, without 'module.'"
            )
        self._named: set[Tensor] = set().union(*matching.values())
        self._is_given = patterns is not None

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter.dim() < 2 or parameter in self._named

    def is_given(self, parameter: Tensor) -> bool:
        """Whether it matches a pattern of the caller's. PowerSGD compresses matrices that match only PATTERNS: they
        would be most of its bytes."""
        return self._is_given and parameter in self._named

    def of_parts(self, parts: Mapping[Tensor, Tensor]) -> Fine:
        """The same for tensors that stand for parameters: `parts` has them by parameter."""
        made = copy.copy(self)
        made._named = {parts.get(parameter, parameter) for parameter in self._named}
        return made

    def without_defaults(self) -> Fine:
        """The same, but matrices that match only PATTERNS are not fine."""
        return self if self._is_given else Fine()


class Cut(NamedTuple):
    """A buffer of gradients by precision; (start, end) in elements, ascending."""

    coarse: list[tuple[int, int]]
    """Stretches for the codec. They contain short fine ones, which are sent as zeros."""
    fine: list[tuple[int, int]]
    """Stretches for 16 bits."""


def cut(parameters: Sequence[Tensor], starts: Sequence[int], size: int, fine: Fine) -> Cut:
    """Cuts a buffer of `size` elements, where the gradient of parameters[i] begins at starts[i]: see `extents`."""
    stretches: list[tuple[int, int]] = []
    for parameter, (start, end) in zip(parameters, extents(parameters, starts, size), strict=True):
        if parameter in fine:
            joins = bool(stretches) and stretches[-1][1] == start
            begin = stretches.pop()[0] if joins else start
            stretches.append((begin, end))
    coarse, at = [], 0
    for start, end in [*(stretch for stretch in stretches if stretch[1] - stretch[0] >= GAP_LEAST), (size, size)]:
        if start > at and (at, start) not in stretches:
            coarse.append((at, start))
        at = end
    return Cut(coarse, stretches)
