"""One vector has the gradients, which of them exist, and what each rank tells."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commlayer.frontend.elastic.averages import ROW, ROWS, Averages, Told, norm


def contribution(averages: Averages, weight: float, place: int, ranks: int, told: Told) -> torch.Tensor:
    vector = averages.vector(ranks)
    for bucket in averages.buckets:
        averages.fill(vector, bucket, weight)
    averages.tell(vector, weight, place, told)
    return vector


def test_an_average_gives_gradients_and_what_each_rank_told() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1))]
    averages = Averages(parameters)
    told = [Told(leaves=1.0), Told(speed=33.0), Told(holds=1.0, invites=1.0)]
    vectors = []
    for rank, weight in enumerate([1.5, 1.5, 0.0]):
        parameters[0].grad = torch.full((2, 3), rank + 1.0)
        parameters[1].grad = torch.full((4,), float("nan")) if rank == 2 else None
        vectors.append(contribution(averages, weight, rank, 3, told[rank]))
    mean = torch.stack(vectors).mean(0)
    for each, expected in zip(averages.told(mean, 3), told, strict=True):
        assert each == pytest.approx(expected)
    averages.put(mean[: averages.size])
    assert parameters[0].grad is not None
    assert parameters[0].grad.allclose(torch.tensor(1.5))  # (1.5 + 2 * 1.5 + 3 * 0) / 3
    assert [each.grad for each in parameters[1:]] == [None, None]  # a rank of weight 0 has none


def test_averages_are_clipped_as_torch_clips_them_and_stay_as_they_are() -> None:
    for most in (0.5, 1e6):
        parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
        averages = Averages(parameters, most)
        for each in parameters:
            each.grad = torch.randn(each.shape)
        vector = contribution(averages, 1.0, 0, 1, Told())
        before = vector.clone()
        expected = torch.nn.utils.clip_grad_norm_(parameters, most)
        clipped = [each.grad.clone() for each in parameters if each.grad is not None]
        averages.put(vector[: averages.size])
        assert averages.norm == pytest.approx(float(expected))
        for each, wanted in zip(parameters, clipped, strict=True):
            torch.testing.assert_close(each.grad, wanted)
        assert torch.equal(vector, before)  # others may still need them


@pytest.mark.parametrize("size", [0, 1, ROW, ROW + 1, 3 * ROW * ROWS + 7])
def test_a_norm_is_the_same_for_any_number_of_threads(size: int) -> None:
    values, threads = torch.randn(size), torch.get_num_threads()
    found = set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.add(norm(values))
    torch.set_num_threads(threads)
    assert len(found) == 1
    assert found.pop() == pytest.approx(values.double().norm().item(), rel=1e-12)
    assert str(norm(torch.tensor([1.0, float("nan")]))) == "nan"
    assert norm(torch.tensor([1.0, float("inf")])) == float("inf")
