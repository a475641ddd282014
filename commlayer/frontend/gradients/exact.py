"""`Exact`: averages a buffer as it is, by one all-reduce."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist

from ...compress.feedback import Added, Feedback
from .reducer import Buffer, Operations, divide_first, real


class Exact(Operations):
    """The reducer of `Form.EXACT`. What the network loses may be fed back."""

    def __init__(self, buffer: Buffer) -> None:
        self._divided = divide_first(buffer.source, buffer.group) if buffer.op == dist.ReduceOp.AVG else 1
        """What the source was divided by: the average is the sum, then."""
        if self._divided > 1:
            buffer = dataclasses.replace(buffer, op=dist.ReduceOp.SUM)
        self.keeps = buffer.feeds_back  # then the source must still be there when the missing parts are known
        super().__init__(buffer, buffer.host(buffer.source.numel()) if self.keeps else buffer.source)
        self.all_reduce(0, self.target, 0, from_source=self.keeps)

    def keep(self, feedback: Feedback, added: Added) -> None:  # noqa: ARG002  # its memory is not used again
        if self.keeps and self.missing:
            if self._divided > 1:
                real(self.buffer.source).mul_(self._divided)  # another codec may add it to values as they are
            feedback.keep(self.buffer.source, self.buffer.parameters, self.buffer.starts, self.missing)
