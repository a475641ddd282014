"""One vector has the gradients, which of them exist, and what each rank tells."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commlayer.frontend.elastic.averages import Averages, Told


def test_an_average_gives_gradients_and_what_each_rank_told() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1))]
    averages = Averages(parameters)
    told = [Told(leaves=1.0), Told(speed=33.0), Told(holds=1.0, invites=1.0)]
    vectors = []
    for rank, weight in enumerate([1.5, 1.5, 0.0]):
        parameters[0].grad = torch.full((2, 3), rank + 1.0)
        parameters[1].grad = torch.full((4,), float("nan")) if rank == 2 else None
        vectors.append(averages.contribution(weight, rank, 3, told[rank]))
    mean = torch.stack(vectors).mean(0)
    for each, expected in zip(averages.told(mean, 3), told, strict=True):
        assert each == pytest.approx(expected)
    averages.put(mean[: averages.size])
    assert parameters[0].grad is not None
    assert parameters[0].grad.allclose(torch.tensor(1.5))  # (1.5 + 2 * 1.5 + 3 * 0) / 3
    assert [each.grad for each in parameters[1:]] == [None, None]  # a rank of weight 0 has none
