"""Point to point through torch.distributed: batches, tags, any source."""

from typing import Any

import torch
import torch.distributed as dist

from tests import ranks
from tests.process.compat.gloo import same_as_gloo


@ranks.on(3, same_as_gloo)
def test_batch_isend_irecv(rank: int, size: int) -> Any:
    """Each rank to each other one, in one batch whose order differs from rank to rank."""
    inputs = [torch.full((peer + 1, 3), float(rank * 10 + peer)) for peer in range(size)]
    outputs = [torch.zeros(rank + 1, 3) for _ in range(size)]
    peers = [peer for peer in range(size) if peer != rank]
    operations = [dist.P2POp(dist.irecv, outputs[peer], peer) for peer in peers]
    operations += [dist.P2POp(dist.isend, inputs[peer], peer) for peer in reversed(peers)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return outputs


@ranks.on(2, same_as_gloo)
def test_tags(rank: int, size: int) -> Any:
    """Messages are sent in one order, and received in another."""
    tensors = [torch.full((1000,), float(rank * 100 + tag)) for tag in range(4)]
    peer = 1 - rank
    works: list[Any] = [dist.isend(tensor, peer, tag=tag) for tag, tensor in enumerate(tensors)]
    received = [torch.zeros(1000) for _ in range(4)]
    works += [dist.irecv(received[tag], peer, tag=tag) for tag in (2, 0, 3, 1)]
    for work in works:
        work.wait()
    return received


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
