"""`commlayer bench codec`: speed and error of the engine's codecs on one core, beside memcpy in the same run.

Times are CPU times of the measuring thread, so that other work on the machine costs cache and memory bandwidth only.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...plans.codec import CODECS, VALUE_BYTES, Codec
from ...transport import kernels
from . import machine
from .samples import Summary, summarise
from .sizes import format_size

SCHEMA = 1
ROUND_S = 0.004
"""The calls of one kernel in one round take at least this long together."""
ERROR_VALUES = 1 << 18
"""Values on which the errors are measured."""
OPERATIONS = ("encode", "decode", "decode_add")
MEMCPY = "memcpy"

Array = npt.NDArray[np.float32]


class Timed(NamedTuple):
    """One line of measurement."""

    codec: str
    level: str
    operation: str


@dataclasses.dataclass(frozen=True)
class CodecSpec:
    """What one run measures. Raises ValueError for unknown codecs and levels, and numbers out of range."""

    sizes: tuple[int, ...]
    """Bytes of float32."""
    codecs: tuple[str, ...] = tuple(CODECS)
    levels: tuple[str, ...] = ()
    """Instruction sets; empty: all that this CPU has."""
    rounds: int = 7
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, chosen, known in (
            ("codec", self.codecs, tuple(CODECS)),
            ("level", self.levels, tuple(kernels.kernel_levels())),
        ):
            for name in chosen:
                if name not in known:
                    raise ValueError(f"{what} {name!r}: choose from {', '.join(known)}")
        for size in self.sizes:
            if size < VALUE_BYTES or size % VALUE_BYTES:
                raise ValueError(f"size {size}: use a multiple of {VALUE_BYTES} bytes, the length of a float32")
        if self.rounds < 1:
            raise ValueError(f"--rounds {self.rounds}: use at least 1")


def gaussian(count: int) -> Array:
    return np.random.default_rng(1).standard_normal(count, np.float32)


def heavy_tailed(count: int) -> Array:
    """Gaussian values, each with a scale of its own, whose logarithm is Gaussian."""
    return gaussian(count) * np.exp(np.random.default_rng(2).standard_normal(count, np.float32))


@contextlib.contextmanager
def one_core() -> Iterator[int]:
    """Runs this thread on the last core it may use; yields the core's number."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield max(allowed)
    finally:
        os.sched_setaffinity(0, allowed)


def errors_of(codec: Codec, values: Array) -> dict[str, float]:
    """`nmse`: mean squared error as a share of the mean square; `cosine`: between the decoded and the true values."""
    encoded = np.empty(codec.encoded_bytes(values.nbytes), np.uint8)
    decoded = np.empty_like(values)
    kernels.encode(codec.number, encoded.ctypes.data, values.ctypes.data, len(values))
    kernels.decode(codec.number, decoded.ctypes.data, encoded.ctypes.data, len(values))
    exact, rounded = values.astype("f8"), decoded.astype("f8")
    square = exact @ exact
    error = rounded - exact
    return {"nmse": error @ error / square, "cosine": rounded @ exact / np.sqrt(square * (rounded @ rounded))}


class Arrays:
    """The memory of one size: float32 values, room for decoded ones, and encoded ones by codec."""

    def __init__(self, codecs: Sequence[str], size: int) -> None:
        self.values = gaussian(size // VALUE_BYTES)
        self.target = np.ones_like(self.values)
        self.encoded = {name: np.ones(CODECS[name].encoded_bytes(size), np.uint8) for name in codecs}

    def call(self, name: str, operation: str, count: int) -> Callable[[], object]:
        """Runs a kernel, or memcpy, on the first `count` values. This object must outlive it."""
        values, target = self.values.ctypes.data, self.target.ctypes.data
        if name == MEMCPY:
            return lambda: ctypes.memmove(target, values, count * VALUE_BYTES)
        number, encoded = CODECS[name].number, self.encoded[name].ctypes.data
        if operation == "encode":
            return lambda: kernels.encode(number, encoded, values, count)
        add = operation == "decode_add"
        return lambda: kernels.decode(number, target, encoded, count, add=add)


def seconds_of(call: Callable[[], object], least_s: float = ROUND_S) -> float:
    """Mean time of a call, in a run of calls that takes at least `least_s`."""
    call()
    calls, took_s, start = 0, 0.0, time.thread_time()
    while took_s < least_s:
        more = max(calls, 1)
        for _ in range(more):
            call()
        calls += more
        took_s = time.thread_time() - start
    return took_s / calls


def measure(spec: CodecSpec, size: int) -> dict[Timed, Summary]:
    """Times memcpy and all kernels in turns, less the time of a call from Python that does nothing."""
    arrays, count = Arrays(spec.codecs, size), size // VALUE_BYTES
    levels = spec.levels or tuple(kernels.kernel_levels())
    timed = [Timed(MEMCPY, "", "copy")]
    timed += [Timed(name, level, each) for name in spec.codecs for level in levels for each in OPERATIONS]
    rounds: dict[Timed, list[list[float]]] = {each: [] for each in timed}
    best = kernels.kernel_levels()[0]
    try:
        for _ in range(spec.rounds):
            for each in timed:
                kernels.select_kernels(each.level or best)
                alone = seconds_of(arrays.call(each.codec, each.operation, 0), ROUND_S / 10)
                took = seconds_of(arrays.call(each.codec, each.operation, count))
                rounds[each].append([max(took - alone, 1e-9) * 1e6])
    finally:
        kernels.select_kernels(best)
    return {each: summarise(samples) for each, samples in rounds.items()}


def rows(spec: CodecSpec, size: int) -> list[dict[str, Any]]:
    """The table of one size as JSON. Rates in GB/s (1e9 bytes of float32 per second)."""
    summaries = measure(spec, size)
    memcpy = summaries[Timed(MEMCPY, "", "copy")]
    found: list[dict[str, Any]] = [
        {"codec": MEMCPY, "level": "", "size_bytes": size, "copy": _speed(size, memcpy, memcpy)}
    ]
    for name in spec.codecs:
        codec = CODECS[name]
        errors = {
            "bytes_per_value": codec.block_bytes / codec.block_values,
            "gaussian": errors_of(codec, gaussian(ERROR_VALUES)),
            "heavy_tailed": errors_of(codec, heavy_tailed(ERROR_VALUES)),
        }
        for level in spec.levels or kernels.kernel_levels():
            speeds = {each: _speed(size, summaries[Timed(name, level, each)], memcpy) for each in OPERATIONS}
            found.append({"codec": name, "level": level, "size_bytes": size, **speeds, **errors})
    return found


def _speed(size: int, summary: Summary, memcpy: Summary) -> dict[str, float]:
    return {
        "gb_s": size / summary.time_us / 1e3,
        "of_memcpy": memcpy.time_us / summary.time_us,
        "spread": summary.spread,
    }


# heading, unit, width
_COLUMNS = (
    ("codec", "", 6),
    ("level", "", 7),
    ("encode", "(GB/s)", 7),
    ("/memcpy", "(%)", 7),
    ("decode", "(GB/s)", 7),
    ("/memcpy", "(%)", 7),
    ("add", "(GB/s)", 7),
    ("/memcpy", "(%)", 7),
    ("spread", "(%)", 6),
    ("B/value", "", 8),
    ("NMSE", "gaussian", 9),
    ("cosine", "", 9),
    ("NMSE", "heavy", 9),
    ("cosine", "tails", 9),
)


def _line(cells: list[str], lead: str = " ") -> str:
    padded = (f"{cell:>{width}}" for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True))
    return lead + " ".join(padded)


def header(spec: CodecSpec, core: int, facts: dict[str, Any]) -> list[str]:
    """The lines above the tables, all starting with '#'."""
    known = "{cpu}, {kernel}, commlayer {commlayer}".format(**facts)
    return [
        f"# commlayer bench codec: core {core} of {facts['cores']}, {known}, load average {facts['load_average']}",
        f"# taking turns     : {spec.rounds} rounds of all kernels; medians; bytes of float32 per second of CPU time",
        "# spread           : (slowest - fastest round) / median, the largest of encode, decode and add",
    ]


def table(size: int, results: list[dict[str, Any]]) -> list[str]:
    """The lines of one size."""
    memcpy = results[0]["copy"]
    lines = [
        "#",
        f"# {format_size(size)}: memcpy {memcpy['gb_s']:.1f} GB/s, spread {memcpy['spread']:.0%}",
        _line([name for name, _, _ in _COLUMNS], "#"),
        _line([unit for _, unit, _ in _COLUMNS], "#"),
    ]
    for row in results[1:]:
        speeds = [row[each] for each in OPERATIONS]
        rates = [cell for each in speeds for cell in (f"{each['gb_s']:.2f}", f"{100 * each['of_memcpy']:.0f}")]
        spread = f"{100 * max(each['spread'] for each in speeds):.0f}"
        errors = [
            cell
            for data in ("gaussian", "heavy_tailed")
            for cell in (f"{row[data]['nmse']:.2g}", f"{row[data]['cosine']:.6f}")
        ]
        lines.append(_line([row["codec"], row["level"], *rates, spread, f"{row['bytes_per_value']:.4f}", *errors]))
    return lines


def run(spec: CodecSpec) -> dict[str, Any]:
    """Measures, prints a table per size, and returns all figures."""
    results: list[dict[str, Any]] = []
    facts = machine.facts()
    with one_core() as core:
        print(*header(spec, core, facts), sep="\n", flush=True)
        for size in spec.sizes:
            found = rows(spec, size)
            print(*table(size, found), sep="\n", flush=True)
            results += found
    return {
        "schema": SCHEMA,
        "command": list(spec.command or sys.argv),
        "machine": facts,
        "rounds": spec.rounds,
        "results": results,
    }
