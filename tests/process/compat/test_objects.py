"""Collectives of Python objects: torch pickles them into byte tensors of unequal lengths."""

from typing import Any

import torch
import torch.distributed as dist

from tests import ranks
from tests.process.compat.gloo import same_as_gloo


@ranks.on(3, same_as_gloo)
def test_objects(rank: int, size: int) -> Any:
    mine = {"rank": rank, "text": "x" * rank * 1000, "tensor": torch.full((rank,), 1.5)}
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, mine)
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(mine, gathered, dst=1)
    known = [mine, rank] if rank == 2 else [None, None]
    dist.broadcast_object_list(known, src=2)
    given: list[Any] = [None]
    dist.scatter_object_list(given, [(peer, "for you") for peer in range(size)] if rank == 0 else None, src=0)
    if rank == 0:
        dist.send_object_list([mine, "sent"], dst=1)
    received: list[Any] = [None, None]
    if rank == 1:
        assert dist.recv_object_list(received, src=0) == 0
    return [everything, gathered, known, given, received]
