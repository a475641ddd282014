"""`Bucket`: the gradients of some parameters as one tensor, and each rank's shard of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from commlayer.frontend.local import bucket
from commlayer.frontend.local.bucket import Bucket, buckets_of, whole_buckets_of
from commlayer.frontend.local.site import Site

SHAPES = ((3, 4), (5,), (2, 2))


def made() -> list[torch.Tensor]:
    parameters: list[torch.Tensor] = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    return [*parameters, nn.Parameter(torch.zeros(4, 3).t())]


def whole(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """Parameters of which this rank has all."""
    return {parameter: parameter for parameter in parameters}


def site_of(rank: int, size: int) -> Site:
    site = Site()
    site.rank, site.size = rank, size
    return site


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shards_have_each_gradient_once(size: int) -> None:
    parameters = made()
    values = torch.arange(1.0, 1 + sum(parameter.numel() for parameter in parameters))
    at, found, seen = 0, [], []
    for parameter in parameters:
        part = values[at : at + parameter.numel()]
        parameter.grad = part.as_strided(parameter.shape, parameter.stride())
        at += parameter.numel()
    for rank in range(size):
        one = Bucket(whole(parameters), site_of(rank, size))
        one.fill()
        found.append(one._shard.clone())
        for parameter, start in zip(one._sent, one._starts, strict=True):
            assert start < len(one._shard)
            assert start + parameter.numel() > 0
        seen += one._sent
        assert one.has_shard == bool(len(one._shard))
    assert torch.equal(torch.cat(found), values)
    assert set(seen) == set(parameters)


def test_small_buckets_are_in_the_shards_of_the_first_ranks() -> None:
    assert [Bucket(whole([nn.Parameter(torch.zeros(2))]), site_of(rank, 4)).has_shard for rank in range(4)] == [
        *(True, True),
        *(False, False),
    ]


def test_absent_gradients_are_zeros_and_stay_absent_where_no_rank_has_one() -> None:
    parameters = made()
    one = Bucket(whole(parameters), Site())
    parameters[0].grad = torch.ones(SHAPES[0])
    one.fill()
    assert float(one._memory.sum()) == 12
    one._memory.fill_(2)
    kept = parameters[0].grad
    one.put([True, False, True, True])
    assert parameters[0].grad is kept
    assert [None if parameter.grad is None else float(parameter.grad.sum()) for parameter in parameters] == [
        *(24, None),
        *(8, 24),
    ]
    assert parameters[3].grad is not None
    assert parameters[3].grad.stride() == parameters[3].stride()


def test_a_parameter_is_awaited_as_often_as_it_is_accumulated() -> None:
    first, second, *_ = made()
    one = Bucket(whole([first, second]), Site())
    one.awaited = {first: 2, second: 1}
    one.arrived(first)
    one.arrived(second)
    assert list(one.awaited) == [first]
    one.arrived(first)
    assert not one.awaited


def test_buckets_are_in_the_order_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = made()
    monkeypatch.setattr(bucket, "BYTES", 50)  # 48, 20, 16 and 48 bytes
    assert [one.parameters for one in buckets_of(whole(parameters), Site())] == [parameters[:2], parameters[2:]]
    assert [one.parameters for one in whole_buckets_of(whole(parameters), Site())] == [parameters]
    large = [nn.Parameter(torch.zeros(100)) for _ in range(bucket.MOST * 4)]
    assert len(buckets_of(whole(large), Site())) == bucket.MOST
