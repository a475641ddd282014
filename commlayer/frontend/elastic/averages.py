"""`Averages`: one vector with all that the ranks tell each other in a step. It is averaged, and all get the same bits.

It has all gradients in buckets, those of the last parameters first, as a backward pass makes them; then, for each
parameter, how many ranks have a gradient; and for each rank some numbers (`Told`). The last bucket is averaged together
with these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ..gradients.samples import weigh
from ..group.parts import part_of, whole_of


class Told(NamedTuple):
    """What a rank tells all others with its gradients."""

    leaves: float = 0.0
    """Above 0: it leaves after this step."""
    speed: float = 0.0
    """Samples per second; 0: unknown."""
    holds: float = 0.0
    """Above 0: it has listened so far, and has the state now."""
    invites: float = 0.0
    """Above 0: processes join after this step."""
    settings: float = 0.0
    """A checksum of the optimizer's hyperparameters; 0: it listens."""
    state: float = 0.0
    """A checksum of its state before this step; 0: nobody has just got one."""
    norm: float = 0.0
    """That of the averages of its part of the model; 0: it has all parts, or nothing is clipped."""


ROW = 4096
"""Values that one thread adds up."""

ROWS = 256
"""Rows of which the squares are in memory at a time."""

BUCKET_BYTES = 1 << 20
"""Gradients of a bucket, at least."""
BUCKETS = 64
"""Buckets of a large model, about: each is an operation."""

EPSILON = 1e-6
"""As `torch.nn.utils.clip_grad_norm_` adds to the norm."""


class Bucket(NamedTuple):
    """Gradients that are averaged together."""

    parameters: list[nn.Parameter]
    begin: int
    """Its place in the vector."""
    end: int


class Averages:
    """The vector, for these parameters. Of parameters that are divided over ranks it has the parts of this rank."""

    def __init__(self, parameters: Sequence[nn.Parameter], clip_norm: float | None = None) -> None:
        """`clip_norm`: the largest norm of all averages together, as of `torch.nn.utils.clip_grad_norm_`; None: any."""
        self._parameters, self.clip_norm = list(reversed(parameters)), clip_norm
        self._sizes = [part_of(each).numel() for each in self._parameters]
        self.norm = math.nan
        """That of the latest averages, before they were clipped; NaN: they are not."""
        self.values = sum(self._sizes)
        """Numbers of gradients, with which the vector begins."""
        self.size = self.values + len(parameters)
        """Numbers in the part that `put` takes."""

        self.buckets = self._divided(max(BUCKET_BYTES // 4, self.values // BUCKETS))
        """In the order of the vector. None is empty, but the only one of a model without parameters."""

    def _divided(self, least: int) -> list[Bucket]:
        found, parameters, begin, end = list[Bucket](), list[nn.Parameter](), 0, 0
        for each, size in zip(self._parameters, self._sizes, strict=True):
            if end - begin >= least:
                found.append(Bucket(parameters, begin, end))
                parameters, begin = [], end
            parameters.append(each)
            end += size
        return [*found, Bucket(parameters, begin, end)]

    def vector(self, ranks: int) -> Tensor:
        """One without gradients, in which none of so many ranks has told anything."""
        found = torch.empty(self.size + ranks * len(Told._fields), dtype=torch.float32, device="cpu")
        found[self.values :].zero_()
        return found

    def fill(self, vector: Tensor, bucket: Bucket, weight: float) -> None:
        """Takes the gradients of the bucket times `weight`."""
        parts = vector[bucket.begin : bucket.end].split([part_of(each).numel() for each in bucket.parameters])
        for each, part in zip(bucket.parameters, parts, strict=True):
            if each.grad is None or weight == 0:
                part.zero_()
            elif each.grad.layout != torch.strided:
                raise ConfigError("elastic: sparse gradients; use sparse=False")
            else:
                gradient = part_of(each.grad)
                part.view_as(gradient).copy_(gradient)
        weigh(vector[bucket.begin : bucket.end], weight)

    def tell(self, vector: Tensor, weight: float, place: int, told: Told | None) -> None:
        """Puts in which gradients the rank at `place` has, and what it tells; None: it does so otherwise."""
        given = torch.tensor(
            [float(weight > 0 and each.grad is not None) for each in self._parameters],
            dtype=torch.float32,
            device="cpu",
        )
        vector[self.values : self.size] = given
        if told is not None:
            vector[self.size + place * len(told) :][: len(told)] = torch.tensor(told, dtype=torch.float32, device="cpu")

    def told(self, averages: Tensor, ranks: int) -> list[Told]:
        """What each rank has told; numbers, but for rounding."""
        return [Told(*row) for row in (averages[self.size :] * ranks).view(ranks, -1).tolist()]

    def norm_of(self, averages: Tensor) -> float:
        """That of these gradients; 0: nothing is clipped."""
        return 0.0 if self.clip_norm is None else norm(averages[: self.values])

    def put(self, averages: Tensor, whole: float | None = None) -> None:
        """Makes the averages the gradients. A parameter without a gradient on any rank has None. `whole`: the norm of
        the averages of all parts of the model; None: these are all."""
        factor = 1.0
        if self.clip_norm is not None:
            self.norm = self.norm_of(averages) if whole is None else whole
            factor = self.clip_norm / (self.norm + EPSILON)
        *parts, given = averages[: self.size].split([*self._sizes, len(self._parameters)])
        for each, part, share in zip(self._parameters, parts, given.tolist(), strict=True):
            values = part.view_as(part_of(each))
            average = values if factor >= 1.0 else values * factor
            if share == 0:
                each.grad = None
            elif each.grad is None:
                each.grad = whole_of(average.clone(), each)
            else:
                part_of(each.grad).copy_(average)


def norm(values: Tensor) -> float:
    """The Euclidean norm of a vector in float32, in double precision. It does not depend on the number of threads: one
    thread adds up a row of values, and the sums of rows are added without rounding."""
    sums: list[float] = []
    for block in values.split(ROWS * ROW):
        whole = len(block) // ROW * ROW
        squares = block.double().square_()
        sums += squares[:whole].view(-1, ROW).sum(1).tolist()
        sums.append(squares[whole:].sum().item())
    return math.sqrt(math.fsum(sums))
