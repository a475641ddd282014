"""`Encoded`: averages a buffer by all-reduces whose messages are encoded; `FineValues`: those that stay in 16 bits."""

from __future__ import annotations

import dataclasses

import torch

from ...compress.codec import FINE
from ...compress.feedback import Added, Feedback
from ...compress.fine import cut
from .reducer import Buffer, Missing, Operations


class FineValues:
    """The fine values of a buffer, in an all-reduce of their own, one after the other."""

    def __init__(self, operations: Operations, stretches: list[tuple[int, int]]) -> None:
        """Starts the all-reduce, and leaves zeros in the source. `stretches`: (start, end) of the values."""
        buffer = operations.buffer
        self._buffer, self._target, self._stretches = buffer, operations.target, stretches
        if not stretches:
            return
        self._packed = packed = torch.cat([buffer.source[start:end] for start, end in stretches])
        for start, end in stretches:
            buffer.source[start:end] = 0
        policy = dataclasses.replace(buffer.policy, codec=FINE, loss_bound=0.0)
        options = operations.options()
        operations.add(None, buffer.group.allreduce_from(packed, packed, options, None, policy=policy))

    def finish(self) -> None:
        """Puts the averages into the target."""
        at = 0
        for start, end in self._stretches:
            self._target[start:end] = self._packed[at : at + end - start]
            if self._target is not self._buffer.source:
                self._buffer.source[start:end] = 0  # the rounding error of zeros sent in place of them is no residual
            at += end - start


class Encoded(Operations):
    """The reducer of `Form.ENCODED`. Rounding errors, and what the network loses, may be fed back."""

    def __init__(self, buffer: Buffer) -> None:
        self._keeps_errors = buffer.codec.keeps_errors
        self.keeps = buffer.feeds_back or self._keeps_errors
        super().__init__(buffer, in_place=not self.keeps)
        parts = cut(buffer.parameters, buffer.starts, buffer.source.numel(), buffer.fine)
        self._fine = FineValues(self, parts.fine)
        for number, (start, end) in enumerate(parts.coarse):
            self.all_reduce(start, end, buffer.key | number, from_source=True)

    def finish(self) -> Missing:
        missing = super().finish()
        self._fine.finish()
        return missing

    def keep(self, feedback: Feedback, added: Added) -> None:
        buffer = self.buffer
        values = buffer.source, buffer.parameters, buffer.starts
        if self._keeps_errors:
            feedback.keep_errors(*values, self.rounded, self.missing if buffer.feeds_back else (), added)
        elif buffer.feeds_back:
            feedback.keep(*values, self.missing)
