"""`Site`: the ranks between which the gradients of a step are averaged. They hold the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Site:
    """A site of one rank, or of the ranks of DistributedDataParallel's group.

    Each rank of a site sends its shard of a fragment to the ranks of the same number in the other sites, and the site
    gathers the shards: a value crosses the slow links once, whatever the number of ranks per site.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())

    def padded(self, values: int) -> int:
        """The least number of values from `values` on of which all ranks have the same share."""
        return -(-values // self.size) * self.size

    def shard(self, values: Tensor) -> Tensor:
        """This rank's shard of a flat tensor of padded length."""
        length = values.numel() // self.size
        return values[self.rank * length : (self.rank + 1) * length]

    def gather(self, shard: Tensor, device: torch.device) -> Tensor:
        """All shards in one tensor on the CPU; they pass `device`, as the site's gradients do. All ranks call."""
        if self.group is None or self.size == 1:
            return shard
        mine = shard.to(device)
        gathered = torch.empty(mine.numel() * self.size, dtype=mine.dtype, device=device)
        dist.all_gather_into_tensor(gathered, mine, group=self.group)
        return gathered.cpu()

    def total(self, value: float, device: torch.device) -> float:
        """The sum of the ranks' values. All ranks call."""
        return self._reduced([value], device, dist.ReduceOp.SUM)[0]

    def largest(self, values: Sequence[float], device: torch.device) -> list[float]:
        """The largest of the ranks' values, one by one. All ranks call."""
        return self._reduced(values, device, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], device: torch.device, op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.group is None or self.size == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(reduced, op, group=self.group)
        return [float(each) for each in reduced.tolist()]
