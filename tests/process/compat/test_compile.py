"""torch.compile: DDP, and functional collectives inside a compiled function."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests import ranks
from tests.process.compat.gloo import same_as_gloo
from tests.process.compat.test_ddp import train


@pytest.mark.parametrize("flags", [{}, {"static_graph": True}], ids=["defaults", "static_graph"])
@ranks.on(2, same_as_gloo)
def test_ddp(rank: int, size: int, flags: dict[str, Any]) -> Any:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    compiled: Any = torch.compile(DistributedDataParallel(model, **flags), backend="aot_eager")
    return train(compiled, rank)


def _collectives(x: Tensor, group: Any) -> list[Tensor]:
    """Every functional collective, each on the output of another one."""
    summed = funcol.all_reduce(x, "sum", group)
    gathered = funcol.all_gather_tensor(summed + 1, 0, group)
    scattered = funcol.reduce_scatter_tensor(gathered * 2, "sum", 0, group)
    turned = funcol.all_to_all_single(gathered, None, None, group)
    first = funcol.broadcast(turned + x[0], 0, group)
    several = funcol.all_reduce_coalesced([summed, first], "max", group)
    parts = funcol.all_gather_into_tensor_coalesced([x, scattered], group)
    back = funcol.reduce_scatter_tensor_coalesced(parts, "sum", [0, 0], group)
    return [tensor * 1 for tensor in (summed, gathered, scattered, turned, first, *several, *parts, *back)]


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@ranks.on(2, same_as_gloo)
def test_functional_collectives(rank: int, size: int, backend: str | None) -> Any:
    function = torch.compile(_collectives, backend=backend, fullgraph=True) if backend else _collectives
    x = torch.arange(12.0).view(6, 2) * (rank + 1)
    return [function(x, dist.group.WORLD) for _ in range(2)]
