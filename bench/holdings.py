"""What a process holds of the system: memory, descriptors, threads, mappings. For tests of leaks."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from pathlib import Path

_PROC = Path("/proc/self")
_PAGE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Holdings:
    """A count of each."""

    memory_mib: float
    """Resident memory, after freed memory was given back."""
    descriptors: int
    threads: int
    mappings: int
    shared_files: int
    """Descriptors and mappings of the engine's memory files."""

    @staticmethod
    def now() -> Holdings:
        """This process's."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        maps = (_PROC / "maps").read_text().splitlines()
        links = [str(each.readlink()) for each in (_PROC / "fd").iterdir() if each.is_symlink()]
        shared = sum("memfd:commlayer" in each for each in (*maps, *links))
        return Holdings(
            memory_mib=int((_PROC / "statm").read_text().split()[1]) * _PAGE_BYTES / (1 << 20),
            descriptors=len(links),
            threads=len(list((_PROC / "task").iterdir())),
            mappings=len(maps),
            shared_files=shared,
        )

    def grown(self, now: Holdings, memory_mib: float, mappings: int = 16) -> str:
        """What of `now` is more than in `self`, in words; empty when there is nothing to complain of.

        The heap may keep `memory_mib` more for reasons of its own, and its arenas some mappings.
        """
        allowed = {"memory_mib": memory_mib, "mappings": mappings}
        return ", ".join(
            f"{field.name}: {getattr(self, field.name):g} -> {getattr(now, field.name):g}"
            for field in dataclasses.fields(self)
            if getattr(now, field.name) > getattr(self, field.name) + allowed.get(field.name, 0)
        )
