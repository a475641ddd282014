"""`Rule`: how a gradient changes a row of an embedding, one row by itself: it does not matter on which rank."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import torch
from torch import Tensor

Optimizer = Literal["sgd", "adagrad"]

EPSILON = 1e-8


@dataclasses.dataclass
class Rule:
    """SGD, `w -= lr g`, or row-wise Adagrad as torchrec's, `s += mean(g^2)`, `w -= lr g / (sqrt(s) + 1e-8)`.

    A record is a row with its state behind it: `columns` values of float32.
    """

    optimizer: Optimizer
    width: int
    lr: float

    @staticmethod
    def fault(optimizer: str, lr: float) -> str:
        """The fault of these arguments, with the remedy; empty: they have none."""
        if optimizer not in get_args(Optimizer):
            return f"optimizer={optimizer!r}: use one of {', '.join(get_args(Optimizer))}"
        if not 0 <= lr < math.inf:
            return f"lr={lr!r}: use a finite number of at least 0"
        return ""

    @property
    def columns(self) -> int:
        """The values of a record."""
        return self.width + (self.optimizer == "adagrad")

    def changed(self, records: Tensor, gradients: Tensor) -> Tensor:
        """The records after a step. `records` has shape (n, columns), `gradients` (n, width)."""
        weights = records[:, : self.width]
        if self.optimizer == "sgd":
            return weights - self.lr * gradients
        state = records[:, self.width] + gradients.square().mean(1)
        weights = weights - self.lr * gradients / (state.sqrt() + EPSILON).unsqueeze(1)
        return torch.cat([weights, state.unsqueeze(1)], 1)
