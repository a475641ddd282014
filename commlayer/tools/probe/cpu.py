"""How long a thread waits for a CPU that other programs have: a probe that waits measures the machine, not the network.

The kernel counts it in /proc/thread-self/schedstat. Waiting for packets, or for room in a buffer, is not part of it.
"""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

STARVED = 0.2
"""Waiting for so much of the time, a thread is too slow for its figures to mean the network. It is not a share of the
time in which it wanted to run: one that sleeps most of the time waits a little whenever it wakes up, on any machine."""
_LEAST_S = 0.01  # a shorter time says nothing: the others get their turns for 1 to 10 ms

_local = threading.local()


class Cpu(NamedTuple):
    """The waiting of one thread so far."""

    at_s: float
    """When this was read, on the clock of `time.monotonic()`."""
    waited_s: float

    def wait_until(self, now: Cpu) -> float:
        """The share of the time between this reading and that of `now` for which the thread waited."""
        passed_s = now.at_s - self.at_s
        return min(1.0, (now.waited_s - self.waited_s) / passed_s) if passed_s > _LEAST_S else 0.0


def read() -> Cpu:
    """The waiting of the calling thread."""
    return Cpu(time.monotonic(), waited_s())


def waited_s() -> float:
    """The time that the calling thread has waited for a CPU; 0 where the kernel does not count it."""
    try:
        if not hasattr(_local, "file"):  # it stays that of this thread
            _local.file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115  # the thread closes it
        return int(os.pread(_local.file.fileno(), 64, 0).split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
