"""The kernel's table of neighbours (ARP), whose size all hosts of an emulation share."""

from __future__ import annotations

from pathlib import Path

LIMIT = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")


def entries(hosts: int, nics: int) -> int:
    """Entries of a job in which each host sends to all others, over each NIC."""
    return hosts * (hosts - 1) * nics


def excess(hosts: int, nics: int, limit: Path = LIMIT) -> str | None:
    """What is wrong if the table is too small for that; None: nothing, or not known."""
    try:
        most = int(limit.read_text())
    except (OSError, ValueError):
        return None
    needed = entries(hosts, nics)
    if needed <= most:
        return None
    return (
        f"{hosts} hosts may need {needed} entries in the kernel's table of neighbours, which takes {most}: packets are "
        f"lost beyond that; use fewer hosts with more ranks, or sysctl -w net.ipv4.neigh.default.gc_thresh3={needed}"
    )
