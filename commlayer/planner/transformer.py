"""A transformer as numbers: what a layer computes, keeps and exchanges, for the comparison of parallelisms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import whole
from ..errors import ConfigError


@dataclass(frozen=True)
class Transformer:
    """A causal transformer of equal layers, and the batch of one step. Embeddings and the loss are left out.

    A layer has four linear layers: queries, keys and values (h x 3 h), projection (h x h), and two of the perceptron
    (h x f, f x h). With several experts, each has a perceptron of its own, and a token goes to `top_k` of them.

    Raises:
        ConfigError: a number that is not whole or below 1, heads that do not divide the width, more experts per token
            than there are, or a time that is negative or not finite.
    """

    layers: int
    width: int
    """h: values per token between layers."""
    heads: int
    length: int
    """Tokens of a sequence."""
    sequences: int
    """Sequences of one step, over all ranks."""
    inner: int | None = None
    """f: width inside the perceptron. None: 4 h."""
    experts: int = 1
    top_k: int = 1
    """Experts of a token."""
    value_bytes: int = 2
    """Bytes of a parameter, a gradient and an activation as they are exchanged: 2 for bf16."""
    state_bytes: int = 16
    """Bytes of memory per parameter: in bf16 with Adam 2 for it, 2 for its gradient, 12 for f32 copy and moments."""
    launch_s: float = 0.0
    """Seconds of one pass of a layer that do not depend on its tokens: the interpreter, starts of kernels."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "length", "sequences", "experts", "top_k", "value_bytes"):
            _check_whole(name, getattr(self, name))
        _check_whole("state_bytes", self.state_bytes)
        _check_whole("inner", self.hidden)
        if self.width % self.heads:
            raise ConfigError(f"heads={self.heads} do not divide width={self.width}; give a width that is a multiple")
        if self.top_k > self.experts:
            raise ConfigError(f"top_k={self.top_k} is above experts={self.experts}; a token goes to each at most once")
        if not 0 <= self.launch_s < math.inf:
            raise ConfigError(f"launch_s={self.launch_s} is not valid; give seconds >= 0")

    @property
    def hidden(self) -> int:
        """f."""
        return 4 * self.width if self.inner is None else self.inner

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Width of the input and of the output of each linear layer."""
        h, f = self.width, self.hidden
        return ((h, 3 * h), (h, h), (h, f), (f, h))

    @property
    def dense_values(self) -> int:
        """Parameters of a layer without its experts: 12 h^2 if there is one and f = 4 h."""
        return 4 * self.width**2 + (2 * self.width * self.hidden if self.experts == 1 else 0)

    @property
    def expert_values(self) -> int:
        """Parameters of a layer's experts; 0 if there is one, which every token passes."""
        return 0 if self.experts == 1 else self.experts * 2 * self.width * self.hidden

    def forward_flop(self, tokens: float, before: float | None = None) -> float:
        """Operations of a layer's forward pass: 2 per parameter and token, and 4 h per token and key of attention.

        `before`: the mean number of keys that a token sees. None: half the sequence, as it is causal.
        """
        keys = self.length / 2 if before is None else before
        perceptron = self.top_k * 2 * self.width * self.hidden
        return tokens * (2 * (4 * self.width**2 + perceptron) + 4 * self.width * keys)

    @property
    def whole_values(self) -> int:
        """Values of h per token that a layer keeps whole under 1-D tensor parallelism: inputs of both norms and of the
        first linear layer after each (Korthikanti et al., arXiv 2205.05198, without masks of dropout)."""
        return 4 * self.width

    @property
    def split_values(self) -> int:
        """Values per token that 1-D tensor parallelism splits: queries, keys, values, the projection's input, and the
        perceptron's values before and after its function, for each expert of the token."""
        return 4 * self.width + self.top_k * 2 * self.hidden


def _check_whole(name: str, value: int) -> None:
    if whole(value, 0) < 1:
        raise ConfigError(f"{name}={value} is not valid; give a whole number of at least 1")
