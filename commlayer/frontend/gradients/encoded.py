"""`Encoded`: averages a buffer by all-reduces whose messages are encoded; `FineValues`: those that stay in 16 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ...compress.codec import FINE
from ...compress.feedback import Added, Feedback
from ...compress.fine import cut
from .reducer import Buffer, Missing, Operations


class FineValues:
    """The fine values of a buffer, in an all-reduce of their own, one after the other."""

    def __init__(self, operations: Operations, stretches: list[tuple[int, int]]) -> None:
        """Starts the all-reduce, and leaves zeros in the source. `stretches`: (start, end) of the values."""
        buffer = operations.buffer
        self._source, self._stretches = buffer.source, stretches
        self.packed = buffer.source[:0]
        """The values; once the operation has ended, their averages."""
        if not stretches:
            return
        self.packed = packed = torch.cat([buffer.source[start:end] for start, end in stretches])
        for start, end in stretches:
            buffer.source[start:end] = 0
        policy = dataclasses.replace(buffer.policy, codec=FINE, loss_bound=0.0)
        options = operations.options()
        operations.add(None, buffer.group.allreduce_from(packed, packed, options, None, policy=policy))

    def drop_errors(self) -> None:
        """Leaves zeros in the source: the rounding error of zeros sent in place of the values is no residual."""
        for start, end in self._stretches:
            self._source[start:end] = 0

    def put_into(self, target: Tensor) -> None:
        """Puts the averages into `target`, which is like the source."""
        at = 0
        for start, end in self._stretches:
            target[start:end] = self.packed[at : at + end - start]
            at += end - start


class Encoded(Operations):
    """The reducer of `Form.ENCODED`. Rounding errors, and what the network loses, may be fed back: they are in the
    source until `keep`, so the average of encoded values waits in memory of its own."""

    def __init__(self, buffer: Buffer) -> None:
        self._keeps_errors = buffer.codec.keeps_errors
        self.keeps = buffer.feeds_back or self._keeps_errors
        parts = cut(buffer.parameters, buffer.starts, buffer.source.numel(), buffer.fine)
        coded = sum(end - start for start, end in parts.coarse)
        super().__init__(buffer, buffer.host(coded) if self.keeps else buffer.source)
        self._fine = FineValues(self, parts.fine)
        at = 0
        self._coarse: list[tuple[Tensor, Tensor]] = []  # the average of a stretch, and its place in the source
        for number, (start, end) in enumerate(parts.coarse):
            begin = at if self.keeps else start
            target = self.target[begin : begin + end - start]
            self._coarse.append((target, buffer.source[start:end]))
            self.all_reduce(start, target, buffer.key | number, from_source=True)
            at += end - start

    def finish(self) -> Missing:
        missing = super().finish()
        if self.keeps:
            self._fine.drop_errors()
        return missing

    def averages(self) -> Sequence[Tensor]:
        return [*(target for target, _ in self._coarse), self._fine.packed]

    def result(self) -> Tensor:
        if self.keeps:
            for target, place in self._coarse:
                place.copy_(target)
        self._fine.put_into(self.buffer.source)
        return self.buffer.source

    def keep(self, feedback: Feedback, added: Added) -> None:
        buffer = self.buffer
        values = buffer.source, buffer.parameters, buffer.starts
        if self._keeps_errors:
            feedback.keep_errors(*values, self.rounded, self.missing if buffer.feeds_back else (), added)
        elif buffer.feeds_back:
            feedback.keep(*values, self.missing)
