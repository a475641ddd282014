"""`Exact`: averages a buffer as it is, by one all-reduce."""

from __future__ import annotations

from ...compress.feedback import Added, Feedback
from .reducer import Buffer, Operations


class Exact(Operations):
    """The reducer of `Form.EXACT`. What the network loses may be fed back."""

    def __init__(self, buffer: Buffer) -> None:
        self.keeps = buffer.feeds_back  # then the source must still be there when the missing parts are known
        super().__init__(buffer, buffer.host(buffer.source.numel()) if self.keeps else buffer.source)
        self.all_reduce(0, self.target, 0, from_source=self.keeps)

    def keep(self, feedback: Feedback, added: Added) -> None:  # noqa: ARG002  # its memory is not used again
        if self.keeps:
            feedback.keep(self.buffer.source, self.buffer.parameters, self.buffer.starts, self.missing)
