"""Fully sharded data parallel: FSDP2 (`fully_shard`), over one mesh dimension and over two (HSDP), and FSDP1."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.testing._internal.common_fsdp import MLP, check_sharded_parity
from torch.testing._internal.common_utils import TestCase

from tests import ranks
from tests.process.compat.gloo import same_as_gloo
from tests.process.compat.test_ddp import data, losses_of


def _fsdp2(rank: int, size: int, shape: tuple[int, ...], options: dict[str, Any]) -> Any:
    model = nn.Sequential(*(MLP(16, torch.device("cpu")) for _ in range(3)))
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    losses = losses_of(model, rank)
    return [losses, [parameter.full_tensor() for parameter in model.parameters()]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ],
    ids=["defaults", "keeps parameters", "bfloat16"],
)
def test_fsdp2(options: dict[str, Any]) -> None:
    same_as_gloo(_fsdp2, 3, (3,), options)


def test_hsdp() -> None:
    same_as_gloo(_fsdp2, 4, (2, 2), {})


@ranks.on(2, ranks.run_job)
def test_torchs_own_parity_check(rank: int, size: int) -> None:
    """The claim of torch's own FSDP2 tests: the shards are those of a model that was trained whole."""
    reference, sharded = MLP(16, torch.device("cpu")), MLP(16, torch.device("cpu"))
    sharded.load_state_dict(reference.state_dict())
    fully_shard(sharded)
    for step in range(2):
        for model in (reference, sharded):
            model.zero_grad()
            model(data(0, step)).sum().backward()
        check_sharded_parity(TestCase(), reference, sharded)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@ranks.on(2, same_as_gloo)
def test_fsdp1(rank: int, size: int, strategy: ShardingStrategy) -> Any:
    model = FullyShardedDataParallel(
        nn.Sequential(*(MLP(16, torch.device("cpu")) for _ in range(2))),
        sharding_strategy=strategy,
        device_id=torch.device("cpu"),
    )
    losses = losses_of(model, rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return [losses, [parameter.detach().clone() for parameter in model.parameters()]]
