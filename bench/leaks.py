"""What a process holds of the system: memory, descriptors, threads, mappings. For tests of leaks."""

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
    """A count of each."""

    heap_mib: float
    """What malloc has given out and not got back."""
    resident_mib: float
    """Memory in use as the kernel sees it, after what is free was given back: fragments, too."""
    descriptors: int
    threads: int
    mappings: int
    shared_files: int
    """Descriptors and mappings of the engine's memory files."""

    @staticmethod
    def now() -> Resources:
        """This process's."""
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallinfo2.restype = _Heap
        heap = libc.mallinfo2()
        maps = (_PROC / "maps").read_text().splitlines()
        links = [str(each.readlink()) for each in (_PROC / "fd").iterdir() if each.is_symlink()]
        shared = sum("memfd:commlayer" in each for each in (*maps, *links))
        return Resources(
            heap_mib=(heap.uordblks + heap.hblkhd) / (1 << 20),
            resident_mib=int((_PROC / "statm").read_text().split()[1]) * _PAGE_BYTES / (1 << 20),
            descriptors=len(links),
            threads=len(list((_PROC / "task").iterdir())),
            mappings=len(maps),
            shared_files=shared,
        )

    def grown(self, now: Resources, heap_mib: float, mappings: int = 16) -> str:
        """What of `now` is more than in `self`, in words; empty when there is nothing to complain of.

        The heap may hold `heap_mib` more, and its arenas some mappings. Resident memory is not judged: with random
        sizes it grows by fragmentation until it levels off.
        """
        allowed = {"heap_mib": heap_mib, "resident_mib": float("inf"), "mappings": mappings}
        return ", ".join(
            f"{field.name}: {getattr(self, field.name):g} -> {getattr(now, field.name):g}"
            for field in dataclasses.fields(self)
            if getattr(now, field.name) > getattr(self, field.name) + allowed.get(field.name, 0)
        )
