"""`Site`: the ranks between which the gradients of a step are averaged. They hold the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import CommError
from ..group.backend import CommProcessGroup

ResultT = TypeVar("ResultT")


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

    def agreed(self, call: Callable[[], ResultT], device: torch.device) -> ResultT:
        """The result of `call`, which exchanges values with other sites. If it raises on a rank of this site, all its
        ranks raise that error: the others would wait for it where the site gathers. All ranks call."""
        if self.group is None or self.size == 1:
            return call()
        own: Exception | None = None
        try:
            result = call()
        except Exception as error:
            own = error
        try:
            has_failed = self.largest([float(own is not None)], device)[0]
        except Exception:
            if own is not None:
                raise own from None
            raise
        if not has_failed:
            return result
        told: list[Any] = [None] * self.size
        shown = own if own is None or isinstance(own, CommError) else CommError(f"{type(own).__name__}: {own}")
        dist.all_gather_object(told, shown, group=self.group)
        failed = own or next(fault for fault in told if fault is not None)
        vars(failed)["is_on_site"] = True
        raise failed

    def abort(self, error: BaseException) -> None:
        """Ends the operations of the site's ranks after this error, unless they raise it, too. Only a group of
        commlayer tells the others; those of other backends wait until their timeout."""
        if self.size > 1 and isinstance(self.group, CommProcessGroup) and not vars(error).get("is_on_site"):
            self.group.abort()

    def _reduced(self, values: Sequence[float], device: torch.device, op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.group is None or self.size == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(reduced, op, group=self.group)
        return [float(value) for value in reduced.tolist()]
