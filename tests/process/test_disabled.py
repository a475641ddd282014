"""COMMLAYER_DISABLE=1: a job that names commlayer runs on plain gloo, and every function says its part."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.group.backend import CommProcessGroup
from tests import ranks

DISABLED = {"COMMLAYER_DISABLE": "1"}


def _world() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def _is_gloo(group: dist.ProcessGroup) -> bool:
    backend = group._get_backend(torch.device("cpu"))
    return not isinstance(group, CommProcessGroup) and isinstance(backend, dist.ProcessGroupGloo)


@ranks.on(2, ranks.run_job, environ=DISABLED)
def test_groups_are_plain_gloo(rank: int, size: int) -> None:
    pair = dist.new_group([0, 1], backend="commlayer", pg_options=commlayer.Options(commlayer.Policy(priority=1)))
    for group in (_world(), pair):
        assert _is_gloo(group)
        tensor = torch.full((1000,), rank + 1.0)
        with commlayer.priority(0):
            dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((1000,), 3.0))
    assert set(commlayer.stats().values()) == {0}
    assert commlayer.stats().keys() >= {"packets_sent", "operations_done"}
    assert commlayer.paths(1 - rank) == []


def _gradients(rank: int, state: commlayer.HookState | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 3)), gradient_as_bucket_view=True)
    if state is not None:
        model.register_comm_hook(state, commlayer.allreduce_hook)
    torch.manual_seed(rank + 1)
    model(torch.randn(8, 50)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@ranks.on(2, ranks.run_job, environ=DISABLED)
def test_the_hook_is_a_plain_all_reduce(rank: int, size: int) -> None:
    state = commlayer.HookState(commlayer.Policy(codec="int8", loss_bound=0.1))
    for one, other in zip(_gradients(rank, state), _gradients(rank, None), strict=True):
        assert torch.equal(one, other)
    assert (state.steps, state.averaged_bytes) == (0, 0)
    assert not state.feedback


@ranks.on(2, ranks.run_job, environ=DISABLED)
def test_overlap_leaves_the_model_as_it_is(rank: int, size: int) -> None:
    model = DistributedDataParallel(nn.Linear(5, 3), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = commlayer.overlap(model, optimizer, staleness=1)
    for _ in range(2):
        model(torch.full((2, 5), rank + 1.0)).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((3, 5), 3.0))
        before = model.module.weight.clone()
        optimizer.step()
        assert not torch.equal(model.module.weight, before)  # at once
        optimizer.zero_grad()
    handle.finish()
    handle.remove()
    assert handle.is_removed
    assert handle.state.steps == 0


@ranks.on(2, ranks.run_job, environ=DISABLED)
def test_fsdp_is_not_compressed(rank: int, size: int) -> None:
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model)
    said = ranks.logged()
    commlayer.compress_fsdp(model, commlayer.Policy(codec="int8"))
    assert said == ["COMMLAYER_DISABLE=1: compress_fsdp has no effect: traffic travels as it is"]
    model(torch.full((1, 8), rank + 1.0)).sum().backward()
    gradient: Any = model.weight.grad
    assert torch.equal(gradient.full_tensor(), torch.full((8, 8), 1.5))
    with pytest.raises(commlayer.ConfigError, match=r"COMMLAYER_DISABLE=1: compress_fsdp.* needs the engine"):
        commlayer.compress_fsdp(model, commlayer.Policy(), replicate=dist.new_group())
    dist.barrier()  # a rank that ends while its peer still makes the group fails it: gloo's own race


@ranks.on(2, ranks.run_job, environ=DISABLED)
def test_pipelines_are_refused(rank: int, size: int) -> None:
    with pytest.raises(commlayer.ConfigError, match=r"COMMLAYER_DISABLE=1: pipeline.attach needs .* unset COMMLAYER_D"):
        commlayer.pipeline.attach(None, torch.optim.SGD([nn.Parameter(torch.ones(1))]), _world())
    with pytest.raises(commlayer.ConfigError, match="COMMLAYER_DISABLE=1: a HookState has no group"):
        commlayer.HookState().group()
