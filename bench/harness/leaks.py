"""The system resources of a process (memory, descriptors, threads, mappings), to find leaks."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from pathlib import Path

_PROC = Path("/proc/self")
_PAGE_BYTES = 4096


class _Heap(ctypes.Structure):
    """`struct mallinfo2`, of all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclasses.dataclass(frozen=True)
class Resources:
    """Counts of resources."""

    heap_mib: float
    """Memory allocated by malloc and not freed."""
    resident_mib: float
    """Resident memory after malloc has returned free memory to the kernel; it includes fragments."""
    descriptors: int
    threads: int
    mappings: int
    shared_files: int
    """Descriptors and mappings of the engine's memory files."""

    @staticmethod
    def now() -> Resources:
        """The resources of this process."""
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallinfo2.restype = _Heap
        heap = libc.mallinfo2()
        maps = (_PROC / "maps").read_text().splitlines()
        links = [str(link.readlink()) for link in (_PROC / "fd").iterdir() if link.is_symlink()]
        shared = sum("memfd:commlayer" in name for name in (*maps, *links))
        return Resources(
            heap_mib=(heap.uordblks + heap.hblkhd) / (1 << 20),
            resident_mib=int((_PROC / "statm").read_text().split()[1]) * _PAGE_BYTES / (1 << 20),
            descriptors=len(links),
            threads=len(list((_PROC / "task").iterdir())),
            mappings=len(maps),
            shared_files=shared,
        )

    def grown(self, now: Resources, heap_mib: float, mappings: int = 16) -> str:
        """The resources of which `now` has too many more than `self`, in words; empty if there are none.

        The heap may grow by `heap_mib`, its arenas by `mappings`. Resident memory may grow: with random sizes it does,
        by fragmentation, until it levels off.
        """
        allowed = {"heap_mib": heap_mib, "resident_mib": float("inf"), "mappings": mappings}
        return ", ".join(
            f"{field.name}: {getattr(self, field.name):g} -> {getattr(now, field.name):g}"
            for field in dataclasses.fields(self)
            if getattr(now, field.name) > getattr(self, field.name) + allowed.get(field.name, 0)
        )
