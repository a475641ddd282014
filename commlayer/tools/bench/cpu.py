"""CPU time in two figures: the time charged to the rank processes, and the busy time of the whole machine.

The kernel handles some packets of loopback and veth in softirq context, and charges that time to the process that
happens to run. The processes' figure alone would favour a backend that moves work into the kernel. The machine's figure
has a resolution of one tick (10 ms) and includes all other processes, so it is good for long blocks only.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds."""

    process_s: float
    """User and system time of this process, all threads."""
    machine_s: float
    """Busy time, summed over all cores."""
    softirq_s: float
    """The part of `machine_s` spent on hardware and software interrupts."""

    @classmethod
    def now(cls) -> CpuTime:
        """Totals since the process, or the machine, started."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        machine_s, softirq_s = parse_proc_stat(Path("/proc/stat").read_text())
        return cls(usage.ru_utime + usage.ru_stime, machine_s, softirq_s)

    def __sub__(self, earlier: CpuTime) -> CpuTime:
        return CpuTime(
            self.process_s - earlier.process_s,
            self.machine_s - earlier.machine_s,
            self.softirq_s - earlier.softirq_s,
        )


def parse_proc_stat(text: str) -> tuple[float, float]:
    """(busy seconds, interrupt seconds) from the first line of /proc/stat; fields are described in proc(5)."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in text.split()[1:9])
    # steal: the hypervisor gave this time to others; it is neither busy nor idle
    del steal
    return (user + nice + system + irq + softirq) / _TICKS_PER_S, (irq + softirq) / _TICKS_PER_S
