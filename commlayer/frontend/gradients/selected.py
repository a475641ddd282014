"""`Selected`: averages a buffer by its largest values (codec `topk:SHARE`).

An all-gather brings every rank the payloads of all ranks (compress/topk.py). Each rank adds them up in the order of the
ranks, so all have the same bits. Nothing is lost, whatever the policy.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist

from ...compress.feedback import Added, Feedback
from ...compress.fine import cut
from ...compress.topk import add_to, selected, take_out
from ...transport import kernels
from .commit import is_finite
from .encoded import FineValues
from .reducer import Buffer, Missing, Operations


class Selected(Operations):
    """The reducer of `Form.SELECTED`. The source is left with the values that were not sent, and rounding errors."""

    keeps = True

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer, in_place=False)
        source, group = buffer.source, buffer.group
        parts = cut(buffer.parameters, buffer.starts, source.numel(), buffer.fine.without_defaults())
        self._fine = FineValues(self, parts.fine)
        count = source.numel() - sum(end - start for start, end in parts.fine)
        self._payloads = torch.empty((0, 0), dtype=torch.uint8)
        if count:
            k = selected(buffer.codec.share, count)
            indices, chosen = torch.empty(k, dtype=torch.uint32), torch.empty(k)
            kernels.select_largest(source.data_ptr(), source.numel(), k, indices.data_ptr(), chosen.data_ptr())
            payload = take_out(source, indices, chosen)
            self._payloads = payload.new_empty((group.size(), len(payload)))
            reliable = dataclasses.replace(buffer.policy, codec="none", loss_bound=0.0)
            self.add(None, group.all_gather_single(self._payloads, payload, policy=reliable))

    def finish(self) -> Missing:
        missing = super().finish()
        if len(self._payloads):
            self.target.zero_()
            for payload in self._payloads:
                add_to(self.target, payload)
            if self.buffer.op == dist.ReduceOp.AVG:
                self.target.div_(self.buffer.group.size())
            self.rounded = [(0, self.buffer.source.nbytes)]
        self._fine.finish()
        if len(self._payloads) and not is_finite(self.target):
            self.target.fill_(math.nan)  # values that were not sent may be infinite, too
        return missing

    def keep(self, feedback: Feedback, added: Added) -> None:
        buffer = self.buffer
        feedback.keep_errors(buffer.source, buffer.parameters, buffer.starts, self.rounded, (), added)
