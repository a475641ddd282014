"""The baselines of bench/overlap.py: the hooks of `overlap` on gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.overlap import FIFO, GLOO, HOOKS, hooks_of
from tests import ranks


def trained(rank: int, system: str) -> tuple[list[Tensor], int]:
    """Parameters after some steps, and the bytes of gradients that commlayer has averaged."""
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), gradient_as_bucket_view=True, bucket_cap_mb=1e-4
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(2 + rank)
    with hooks_of(system, model, optimizer) as handle:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    averaged = handle.state.averaged_bytes if handle is not None else 0
    return [each.detach() for each in model.parameters()], averaged


@pytest.mark.parametrize("system", [HOOKS, FIFO])
@ranks.on(2, ranks.run_gloo)
def test_hooks_train_as_ddp_does(rank: int, size: int, system: str) -> None:
    """`overlap, one class` beside it, which makes a commlayer group."""
    plain, _ = trained(rank, GLOO)
    ours, averaged = trained(rank, system)
    assert all(map(torch.equal, plain, ours))
    assert (averaged > 0) == (system == FIFO)
    dist.barrier()
