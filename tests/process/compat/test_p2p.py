"""Point to point through torch.distributed: any source, types. tests/conformance.py has batches and tags."""

from typing import Any

import torch
import torch.distributed as dist

from tests import ranks
from tests.process.compat.gloo import same_as_gloo


@ranks.on(3, same_as_gloo)
def test_any_source(rank: int, size: int) -> None:
    if rank:
        dist.send(torch.full((5,), rank), 0, tag=3)
        return
    tensors = [torch.zeros(5, dtype=torch.int64) for _ in range(size - 1)]
    sources = [dist.recv(tensor, tag=3) for tensor in tensors]
    assert [tensor.tolist() for tensor in tensors] == [[source] * 5 for source in sources]
    assert sorted(sources) == [1, 2]


@ranks.on(2, same_as_gloo)
def test_types(rank: int, size: int) -> Any:
    tensor = torch.arange(24.0).view(4, 6) * (rank + 1)
    if rank == 0:
        dist.send(tensor.t().contiguous(), 1)
        dist.send(tensor[0].bfloat16(), 1)
        return tensor
    whole, part = torch.zeros(6, 4), torch.zeros(6, dtype=torch.bfloat16)
    dist.recv(whole, 0)
    dist.recv(part, 0)
    return [whole, part]
