"""ZeroRedundancyOptimizer: every rank keeps, and updates, its part of the optimizer's state."""

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests import ranks
from tests.process.compat.gloo import same_as_gloo
from tests.process.compat.test_ddp import Net, data


def _zero(rank: int, size: int, overlap: bool) -> Any:
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=overlap, broadcast_buffers=not overlap)
    kind: Any = torch.optim.Adam
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, overlap_with_ddp=overlap, lr=0.01)
    if overlap:
        model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    for step in range(4):
        model.zero_grad()
        model(data(rank, step)).square().mean().backward()
        optimizer.step()
    if overlap:  # its first iterations only look on
        return list(model.parameters())
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    return [list(model.parameters()), [entry["exp_avg"] for entry in state.values()]]


def test_zero() -> None:
    same_as_gloo(_zero, 2, False)


def _overlaps(rank: int, size: int) -> Any:
    with ranks.job(rank, size):
        return [parameter.tolist() for parameter in _zero(rank, size, True)]


def test_overlap_with_ddp() -> None:
    """torch refuses it to gloo by name, so there is no oracle: the replicas must be the same."""
    results = ranks.run(_overlaps, 2)
    assert results[0] == results[1]
