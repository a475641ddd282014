"""`Beside`: whether the training in this process sends. What is published waits while it does.

Otherwise TCP, with a connection for each reader, takes most of a link that both share, whatever its packets are marked.
"""

from __future__ import annotations

import math

from ..transport.native import Engine

LOOK_S = 0.005
"""Time between two looks while something is to be sent."""

HOLD_S = 0.03
"""Training sends until it has sent nothing for so long: its buckets follow one another, and a link that is full with
other packets lets few of its own pass."""

MEMORY_S = 5.0
"""Training that has sent within this time goes on."""

SHARE = 32
"""One byte is published for so many of a training that always sends."""


class Beside:
    """Belongs to the thread that serves."""

    def __init__(self) -> None:
        self._looked_s, self._sent_s = 0.0, -math.inf
        self._sent_bytes = 0
        self._allowed_bytes = 0.0

    @property
    def is_sending(self) -> bool:
        """Whether training sends now."""
        return self._looked_s - self._sent_s < HOLD_S

    @property
    def is_there(self) -> bool:
        """Whether it does now and then."""
        return self._looked_s - self._sent_s < MEMORY_S

    def look(self, now_s: float) -> None:
        """Reads the engine's counter, if it is time. The engine that other threads use is the process's."""
        if now_s - self._looked_s < LOOK_S:
            return
        with Engine.held() as engine:
            sent_bytes = 0 if engine is None else engine.stats()["payload_bytes_sent"]
        grown_bytes, before_s = sent_bytes - self._sent_bytes, self._looked_s
        self._looked_s, self._sent_bytes = now_s, sent_bytes
        if grown_bytes > 0:
            self._sent_s = now_s
        if now_s - before_s < HOLD_S:
            self._allowed_bytes += grown_bytes / SHARE
        if not self.is_sending:
            self._allowed_bytes = 0.0

    @property
    def may_publish(self) -> bool:
        """Whether something may be sent now."""
        return not self.is_sending or self._allowed_bytes > 0

    def publish(self, count: int) -> None:
        """So many bytes were sent."""
        if self.is_sending:
            self._allowed_bytes -= count
