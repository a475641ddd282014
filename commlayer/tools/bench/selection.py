"""`commlayer bench select`: speed of the engine's selection of the largest values, on one core.

Beside it, in turns: reading the values twice, which an exact selection needs (by the C library's memchr, which finds
nothing), and `torch.topk` of magnitudes that are there already, unsorted, in one thread. Times are CPU times of the
measuring thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from ...compress.topk import selected
from ...transport import kernels
from . import machine
from .codec import SCHEMA, gaussian, heavy_tailed, one_core, seconds_of
from .samples import Summary, summarise
from .sizes import format_size

READ = "read"
TORCH = "torch.topk"
ABSENT = 0x11
"""A byte that float32 values of 1.0 do not have."""

DATA: dict[str, Callable[[int], Any]] = {"gaussian": gaussian, "heavy tails": heavy_tailed}


@dataclasses.dataclass(frozen=True)
class SelectionSpec:
    """What one run measures. Raises ValueError for numbers out of range."""

    sizes: tuple[int, ...]
    """Bytes of float32."""
    share: float = 0.01
    """The share of the values that are selected."""
    rounds: int = 7
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size < 4 or size % 4:
                raise ValueError(f"size {size}: use a multiple of 4 bytes, the length of a float32")
        if not 0 < self.share <= 0.5:
            raise ValueError(f"--share {self.share:g}: use above 0, and at most 0.5")
        if self.rounds < 1:
            raise ValueError(f"--rounds {self.rounds}: use at least 1")


def calls_of(values: Any, k: int) -> dict[str, Callable[[], object]]:
    """What takes turns: reading `values` once, `torch.topk`, and our selection at each level of this CPU."""
    count = len(values)
    ones, magnitudes = np.ones(count, np.float32), torch.from_numpy(np.abs(values))
    indices, chosen = np.empty(k, np.uint32), np.empty(k, np.float32)
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes, memchr.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p

    def read() -> object:
        return memchr(ones.ctypes.data, ABSENT, ones.nbytes)  # None: it has read everything

    def select(level: str) -> Callable[[], object]:
        def call() -> None:
            kernels.select_kernels(level)
            kernels.select_largest(values.ctypes.data, count, k, indices.ctypes.data, chosen.ctypes.data)

        return call

    def topk() -> object:
        return torch.topk(magnitudes, k, sorted=False)

    return {READ: read, TORCH: topk, **{level: select(level) for level in kernels.kernel_levels()}}


def measure(spec: SelectionSpec, data: str, size: int) -> dict[str, Summary]:
    """Times all calls in turns."""
    values = DATA[data](size // 4)
    calls = calls_of(values, selected(Fraction(spec.share).limit_denominator(10**6), len(values)))
    rounds: dict[str, list[list[float]]] = {name: [] for name in calls}
    best, threads = kernels.kernel_levels()[0], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(spec.rounds):
            for name, call in calls.items():
                rounds[name].append([seconds_of(call) * 1e6])
    finally:
        kernels.select_kernels(best)
        torch.set_num_threads(threads)
    return {name: summarise(samples) for name, samples in rounds.items()}


def rows(spec: SelectionSpec, data: str, size: int) -> list[dict[str, Any]]:
    """One row per level, as JSON; rates in GB/s (1e9 bytes of float32 per second)."""
    found = measure(spec, data, size)
    read, topk = found.pop(READ), found.pop(TORCH)
    return [
        {
            "data": data,
            "level": level,
            "size_bytes": size,
            "share": spec.share,
            "gb_s": size / summary.time_us / 1e3,
            "read_gb_s": size / read.time_us / 1e3,
            "of_two_reads": 2 * read.time_us / summary.time_us,
            "beside_torch": topk.time_us / summary.time_us,
            "spread": max(summary.spread, read.spread, topk.spread),
        }
        for level, summary in found.items()
    ]


def lines_of(found: list[dict[str, Any]]) -> list[str]:
    """The table of one kind of data and size."""
    first = found[0]
    lines = [
        "#",
        f"# {format_size(first['size_bytes'])}, {first['data']}: one read {first['read_gb_s']:.1f} GB/s",
        "#  level   GB/s  of two reads (%)  beside torch.topk  spread (%)",
    ]
    lines += [
        f"{row['level']:>8} {row['gb_s']:6.2f} {100 * row['of_two_reads']:17.0f} {row['beside_torch']:17.1f}x "
        f"{100 * row['spread']:11.0f}"
        for row in found
    ]
    return lines


def run(spec: SelectionSpec) -> dict[str, Any]:
    """Measures, prints a table per size and kind of data, and returns all figures."""
    results: list[dict[str, Any]] = []
    facts = machine.facts()
    known = "{cpu}, {kernel}, torch {torch}, commlayer {commlayer}".format(**facts)
    with one_core() as core:
        print(f"# commlayer bench select: core {core} of {facts['cores']}, {known}")
        print(f"# the largest {spec.share:.2%} of the values; medians of {spec.rounds} rounds, in turns", flush=True)
        for size in spec.sizes:
            for data in DATA:
                found = rows(spec, data, size)
                print(*lines_of(found), sep="\n", flush=True)
                results += found
    return {"schema": SCHEMA, "command": list(spec.command or sys.argv), "machine": facts, "results": results}
