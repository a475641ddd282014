"""`Link`: the rate of the network and a time that every step costs, from measured steps.

    busy time of a step = latency + bytes x seconds per byte

Two periods with codecs of different lengths give both. With few bytes, most of the busy time is latency: without that
term, a link under a short code would look slow, and a longer code never worth trying. A trial of longer codes
(`Choice`) tells them apart where no other period does.
"""

from __future__ import annotations

DISTINCT = 1.5
"""Ratio of the bytes of two periods that tell latency and rate apart."""
LATENCY_MOST = 0.95
"""Share of the busy time."""


class Link:
    """The network as the last periods have shown it. Ranks that are given the same values have the same one."""

    def __init__(self) -> None:
        self.latency_s = 0.0
        """The latency per step."""
        self.seconds_per_byte = 0.0
        """0: not known yet."""
        self._last = (0.0, 0.0)

    def measure(self, sent_bytes: float, busy_s: float, *, is_trial: bool = False) -> None:
        """Takes a period in: the bytes of a step, above 0, and the time that the network was busy with them.

        `is_trial`: their codes differ from those of the last period only to be compared with them.
        """
        last_bytes, last_s = self._last
        shorter, longer = sorted((last_bytes, sent_bytes))
        if shorter > 0 and longer >= DISTINCT * shorter:
            slope = (busy_s - last_s) / (sent_bytes - last_bytes)
            if slope > 0:  # else the rate has changed meanwhile
                self.latency_s = max(busy_s - slope * sent_bytes, 0.0)
            elif is_trial and sent_bytes > last_bytes:  # more bytes took no longer
                self.latency_s = busy_s
        self._last = sent_bytes, busy_s
        self.latency_s = min(self.latency_s, LATENCY_MOST * busy_s)
        self.seconds_per_byte = (busy_s - self.latency_s) / sent_bytes
