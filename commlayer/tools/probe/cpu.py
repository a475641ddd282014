"""How long a thread waits for a CPU that other programs have: a probe that waits measures the machine, not the network.

The kernel counts it in /proc/thread-self/schedstat. Waiting for packets, or for room in a buffer, is not part of it.
"""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

STARVED = 0.25
"""Waiting for so much of the time in which it wanted to run, a thread is too slow for its figures to mean the network:
a rate is a finding where it is 1.5 times too low, for which a third of the time suffices."""
_LEAST_S = 0.005  # less says nothing: the clock of a tick has 1 to 10 ms

_local = threading.local()


class Cpu(NamedTuple):
    """The time of one thread so far."""

    ran_s: float
    waited_s: float

    def wait_until(self, now: Cpu) -> float:
        """The share of waiting in the time that the thread wanted to run between this reading and that of `now`."""
        ran_s, waited_s = now.ran_s - self.ran_s, now.waited_s - self.waited_s
        return waited_s / (ran_s + waited_s) if ran_s + waited_s > _LEAST_S else 0.0


def read() -> Cpu:
    """The time of the calling thread."""
    return Cpu(time.thread_time(), waited_s())


def waited_s() -> float:
    """The time that the calling thread has waited for a CPU; 0 where the kernel does not count it."""
    try:
        if not hasattr(_local, "file"):  # it stays that of this thread
            _local.file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115  # the thread closes it
        return int(os.pread(_local.file.fileno(), 64, 0).split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
