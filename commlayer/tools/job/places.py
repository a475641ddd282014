"""The place of a process in its job, and the TCP counters of its host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_SNMP = Path("/proc/net/snmp")


def rank_of(environ: Mapping[str, str]) -> int:
    """The rank of this process: of its default group, or of its environment; 0 outside of a job."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_rank()
    text = environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def tcp_counts(snmp: Path = _SNMP) -> dict[str, int]:
    """TCP segments that this network namespace sent, and sent again; empty where the kernel does not tell."""
    try:
        rows = [line.split() for line in snmp.read_text(encoding="utf-8").splitlines() if line.startswith("Tcp:")]
    except OSError:
        return {}
    if len(rows) != 2:
        return {}
    found = dict(zip(*rows, strict=False))
    names = {"sent": "OutSegs", "resent": "RetransSegs"}
    return {name: int(found[column]) for name, column in names.items() if column in found}
