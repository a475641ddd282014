"""`Selected`: averages a buffer by its largest values (codec `topk:SHARE`).

An all-gather brings every rank the payloads of all ranks (compress/topk.py). Each rank adds them up in the order of the
ranks, so all have the same bits. Nothing is lost, whatever the policy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.feedback import Added, Feedback
from ...compress.fine import cut
from ...compress.topk import add_to, largest_of, selected, take_out
from ...compress.values import is_finite
from ...transport import kernels
from .encoded import FineValues
from .reducer import Buffer, Missing, Operations


class Selected(Operations):
    """The reducer of `Form.SELECTED`. The source is left with the values that were not sent, and rounding errors."""

    keeps = True
    _overflows = False

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer, buffer.source)
        source, group = buffer.source, buffer.group
        parts = cut(buffer.parameters, buffer.starts, source.numel(), buffer.fine.without_defaults())
        self._fine = FineValues(self, parts.fine)
        count = source.numel() - sum(end - start for start, end in parts.fine)
        self._payloads = torch.empty((0, 0), dtype=torch.uint8, device="cpu")
        if count:
            k = selected(buffer.codec.share, count)
            indices, chosen = (
                torch.empty(k, dtype=torch.uint32, device="cpu"),
                torch.empty(k, dtype=torch.float32, device="cpu"),
            )
            kernels.select_largest(source.data_ptr(), source.numel(), k, indices.data_ptr(), chosen.data_ptr())
            payload = take_out(source, indices, chosen)
            self._payloads = payload.new_empty((group.size(), len(payload)))
            reliable = dataclasses.replace(buffer.policy, codec="none", loss_bound=0.0)
            self.add(None, group.all_gather_single(self._payloads, payload, policy=reliable))

    def finish(self) -> Missing:
        missing = super().finish()
        if len(self._payloads):
            self.rounded = [(0, self.buffer.source.nbytes)]
        self._fine.drop_errors()
        if not is_finite(self._fine.packed) or not self._is_finite():
            self._overflows = True
        return missing

    def averages(self) -> Sequence[Tensor]:
        return [torch.tensor([math.nan if self._overflows else 0.0], dtype=torch.float32, device="cpu")]

    def result(self) -> Tensor:
        if len(self._payloads):
            self._sum_into(self.target.zero_())
            if self.buffer.op == dist.ReduceOp.AVG:
                self.target.div_(self.buffer.group.size())
        self._fine.put_into(self.target)
        if len(self._payloads) and self._overflows:
            self.target.fill_(math.nan)  # values that were not sent may be infinite, too
        return self.target

    def _is_finite(self) -> bool:
        """Whether the sum of all payloads is finite. Their largest values tell, unless these are near the largest
        float: then it is made in memory of its own."""
        if sum(largest_of(payload, self.target) for payload in self._payloads) <= torch.finfo(torch.float32).max / 2:
            return True
        total = torch.zeros_like(self.target)
        self._sum_into(total)
        return is_finite(total)

    def _sum_into(self, total: Tensor) -> None:
        for payload in self._payloads:
            add_to(total, payload)

    def keep(self, feedback: Feedback, added: Added) -> None:
        buffer = self.buffer
        feedback.keep_errors(buffer.source, buffer.parameters, buffer.starts, self.rounded, (), added)
