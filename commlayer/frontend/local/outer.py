"""`Outer`: the optimizer that changes the shared weights by the sites' average change; SGD with Nesterov momentum."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...errors import ConfigError
from ...kind import number
from .turns import Turns

LONG = 24
"""The steps between syncs from which on momentum has paid without a delay."""


class Outer(NamedTuple):
    """Learning rate and momentum. (1, 0) makes the shared weights the average of the sites' weights."""

    lr: float
    momentum: float

    @staticmethod
    def of(given: object) -> Outer:
        """Raises ConfigError unless `given` is a pair of numbers in range."""
        values = tuple(map(number, given)) if isinstance(given, (tuple, list)) else ()
        if len(values) != 2 or not (0 < values[0] <= 2 and 0 <= values[1] < 1):
            raise ConfigError(
                f"LocalSteps(outer={given!r}): give (learning rate, momentum), above 0 and up to 2, and 0 to below 1; "
                f"(1, 0) averages; None chooses by every and delay"
            )
        return Outer(*values)

    @staticmethod
    def default(turns: Turns) -> Outer:
        """The best of the trials of docs/local.md: momentum pays with a short delay, and harms with a long one."""
        if turns.mean_delay * 4 > turns.every:
            return PLAIN
        if turns.delay:
            return Outer(0.7, 0.6)
        return Outer(0.7, 0.9) if turns.every >= LONG else PLAIN

    def change(self, average: Tensor, momentum: Tensor) -> Tensor:
        """The change of the shared weights, G' - G, by the average change D of the sites: m' = mu m - D and
        G' = G - lr (mu m' - D). `momentum` m becomes m'.

        Every operation rounds once, so all CPUs make the same bits: no product is fused with a sum.
        """
        if not self.momentum:
            return average if self.lr == 1 else average * self.lr
        momentum.mul_(self.momentum).sub_(average)
        return (average - momentum * self.momentum).mul_(self.lr)


PLAIN = Outer(1.0, 0.0)
"""Averages."""
