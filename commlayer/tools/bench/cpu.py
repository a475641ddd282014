"""CPU time, twice: what the rank processes were charged, and how busy the whole machine was.

Packets on loopback and veth are partly handled in softirq context, which is charged to whoever happens to run: the
processes' own figure alone would flatter a backend that makes the kernel do the work elsewhere. The machine's figure
has the tick as its resolution (10 ms) and includes everything else that runs, so read it only for long blocks.
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
    """Time all cores were not idle."""
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
    # steal is time the hypervisor gave to others: not ours, not idle
    del steal
    return (user + nice + system + irq + softirq) / _TICKS_PER_S, (irq + softirq) / _TICKS_PER_S
