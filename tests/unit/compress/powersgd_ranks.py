"""Ranks that compress with PowerSGD in one process, without a network."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commlayer.compress.powersgd import Compression, PowerSgd

Shapes = Sequence[tuple[int, ...]]
SHAPES: Shapes = ((12, 40), (7,), (40, 12), (12, 40), (8, 3, 5, 2), (2, 3), (1,), (0, 4), (12, 40))
COMPRESSED = (0, 2, 3, 4, 8)  # of SHAPES, with rank 1 or 2


def mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0)


def team(size: int, rank: int = 2, **options: Any) -> list[PowerSgd]:
    return [PowerSgd(rank, **options) for _ in range(size)]


def draw(size: int, shapes: Shapes, seed: int) -> list[list[Tensor]]:
    """Random gradients of every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(size)]


def reduce(
    ranks: list[PowerSgd],
    gradients: list[list[Tensor]],
    numbers: Sequence[int] | None = None,
    average: Callable[[list[Tensor]], Tensor] = mean,
    **options: Any,
) -> list[list[Tensor]]:
    """One step of one bucket on all ranks; `average` is that of the factors. Returns each rank's averaged gradients."""
    results = [[tensor.clone() for tensor in own] for own in gradients]
    begun: list[Compression] = []
    for rank, result in zip(ranks, results, strict=True):
        begun.append(rank.compress(numbers or range(len(result)), result, **options))
    exact = shifted(mean([rank.exact for rank in begun]), len(ranks))
    left = shifted(average([rank.left for rank in begun]), len(ranks))
    projected = [bucket.project(averaged) for bucket, averaged in zip(begun, left, strict=True)]
    right = shifted(average(projected), len(ranks))
    for i, compression in enumerate(begun):
        compression.finish(exact[i], right[i])
        compression.keep()
    return results


def shifted(averaged: Tensor, size: int) -> list[Tensor]:
    """The same values for each rank, in memory of other alignments."""
    return [torch.cat([torch.ones(i), averaged])[i:] for i in range(size)]


def error(rank: PowerSgd, number: int, shape: tuple[int, ...]) -> Tensor:
    """The part of a parameter's gradients that the rank keeps."""
    return torch.as_tensor(rank.state_dict()["errors"].get(number, torch.zeros(shape))).view(shape)


def snapshot(ranks: list[PowerSgd]) -> dict[tuple[int, str, int], Tensor]:
    """Copies of the states: by rank, "errors" or "right", and parameter."""
    states = [rank.state_dict() for rank in ranks]
    parts = [(rank, part) for rank in range(len(ranks)) for part in ("errors", "right")]
    return {(rank, part, i): value.clone() for rank, part in parts for i, value in states[rank][part].items()}


def same_bits(first: dict[tuple[int, str, int], Tensor], second: dict[tuple[int, str, int], Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[i], second[i]) for i in first)
