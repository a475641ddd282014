"""Speed and errors of the engine's kernels on one core: its codecs, and its selection of the largest values.

    python -m bench.kernels                                       # both
    python -m bench.kernels --only codec --codecs int8 int4 --sizes 256K --json codec.json
    python -m bench.kernels --only select --sizes 64M --share 0.001

Codecs take turns with memcpy. The selection takes turns with reading the values (an exact one needs two reads; the C
library's memchr, which finds nothing, makes one) and with `torch.topk` of magnitudes that are there already, unsorted,
in one thread. Times are CPU times of the measuring thread, so that other work on the machine costs cache and memory
bandwidth only. Rates are in GB/s: 1e9 bytes of float32 per second.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.harness.options import options
from commlayer.compress.topk import selected
from commlayer.plans.codec import CODECS, VALUE_BYTES, Codec
from commlayer.tools.bench import machine
from commlayer.tools.bench.samples import Summary, summarise
from commlayer.tools.bench.sizes import format_size, parse_size
from commlayer.transport import kernels

ROUND_S = 0.004
"""The calls of one kernel in one round take at least this long together."""
ERROR_VALUES = 1 << 18
"""Values on which the errors are measured."""
OPERATIONS = ("encode", "decode", "decode_add")
MEMCPY, READ, TORCH = "memcpy", "read", "torch.topk"
ABSENT = 0x11
"""A byte that float32 values of 1.0 do not have."""

Array = npt.NDArray[np.float32]
Timed = tuple[str, str, str]
"""Codec, instruction set and operation of one line."""
COPY: Timed = (MEMCPY, "", "copy")


def gaussian(count: int) -> Array:
    return np.random.default_rng(1).standard_normal(count, np.float32)


def heavy_tailed(count: int) -> Array:
    """Gaussian values, each with a scale of its own, whose logarithm is Gaussian."""
    return gaussian(count) * np.exp(np.random.default_rng(2).standard_normal(count, np.float32))


DATA: dict[str, Callable[[int], Array]] = {"gaussian": gaussian, "heavy_tailed": heavy_tailed}


@contextlib.contextmanager
def one_core() -> Iterator[int]:
    """Runs this thread on the last core it may use, and torch in one thread; yields the core's number. At the end the
    kernels are the fastest ones again."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(allowed)})
    torch.set_num_threads(1)
    try:
        yield max(allowed)
    finally:
        kernels.select_kernels(kernels.kernel_levels()[0])
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, allowed)


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


def time_codecs(size: int, codecs: Sequence[str], levels: Sequence[str], rounds: int) -> dict[Timed, Summary]:
    """Times memcpy and all kernels in turns, less the time of a call from Python that does nothing."""
    arrays, count = Arrays(codecs, size), size // VALUE_BYTES
    timed = [COPY, *((name, level, operation) for name in codecs for level in levels for operation in OPERATIONS)]
    samples: dict[Timed, list[list[float]]] = {case: [] for case in timed}
    for _ in range(rounds):
        for name, level, operation in timed:
            kernels.select_kernels(level or kernels.kernel_levels()[0])
            alone = seconds_of(arrays.call(name, operation, 0), ROUND_S / 10)
            took = seconds_of(arrays.call(name, operation, count))
            samples[name, level, operation].append([max(took - alone, 1e-9) * 1e6])
    return {case: summarise(found) for case, found in samples.items()}


def codec_rows(size: int, codecs: Sequence[str], levels: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """The figures of one size: memcpy's, then those of each codec and level."""
    summaries = time_codecs(size, codecs, levels, rounds)
    memcpy = summaries[COPY]

    def speed(summary: Summary) -> dict[str, float]:
        of_memcpy = memcpy.time_us / summary.time_us
        return {"gb_s": size / summary.time_us / 1e3, "of_memcpy": of_memcpy, "spread": summary.spread}

    found: list[dict[str, Any]] = [{"codec": MEMCPY, "level": "", "size_bytes": size, "copy": speed(memcpy)}]
    for name in codecs:
        errors: dict[str, Any] = {"bytes_per_value": CODECS[name].block_bytes / CODECS[name].block_values}
        errors |= {data: errors_of(CODECS[name], make(ERROR_VALUES)) for data, make in DATA.items()}
        for level in levels:
            speeds = {operation: speed(summaries[name, level, operation]) for operation in OPERATIONS}
            found.append({"codec": name, "level": level, "size_bytes": size, **speeds, **errors})
    return found


def codec_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of one size. The spread is (slowest - fastest round) / median, the largest of the three kernels."""
    memcpy = rows[0]["copy"]
    lines = [
        f"# {format_size(rows[0]['size_bytes'])}: memcpy {memcpy['gb_s']:.1f} GB/s, spread {memcpy['spread']:.0%}",
        "#                encode /memcpy  decode /memcpy     add /memcpy spread B/value     Gaussian:    heavy tails:",
        "# codec   level    GB/s       %    GB/s       %    GB/s       %      %            NMSE cosine    NMSE cosine",
    ]
    for row in rows[1:]:
        speeds = [row[operation] for operation in OPERATIONS]
        rates = " ".join(f"{speed['gb_s']:7.2f} {100 * speed['of_memcpy']:7.0f}" for speed in speeds)
        spread = 100 * max(speed["spread"] for speed in speeds)
        errors = " ".join(f"{row[data]['nmse']:7.1e} {row[data]['cosine']:6.4f}" for data in DATA)
        name = f"{row['codec']:>7} {row['level']:>7}"
        lines.append(f"{name} {rates} {spread:6.0f} {row['bytes_per_value']:7.4f} {errors}")
    return lines


def select_calls(values: Array, k: int) -> dict[str, Callable[[], object]]:
    """What takes turns: reading `values` once, `torch.topk`, and our selection at each level of this CPU."""
    count = len(values)
    ones, magnitudes = np.ones(count, np.float32), torch.from_numpy(np.abs(values))
    indices, chosen = np.empty(k, np.uint32), np.empty(k, np.float32)
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes, memchr.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p

    def select(level: str) -> Callable[[], object]:
        def call() -> None:
            kernels.select_kernels(level)
            kernels.select_largest(values.ctypes.data, count, k, indices.ctypes.data, chosen.ctypes.data)

        return call

    return {
        READ: lambda: memchr(ones.ctypes.data, ABSENT, ones.nbytes),  # None: it has read everything
        TORCH: lambda: torch.topk(magnitudes, k, sorted=False),
        **{level: select(level) for level in kernels.kernel_levels()},
    }


def select_rows(size: int, data: str, share: float, rounds: int) -> list[dict[str, Any]]:
    """The figures of one size and kind of data: those of each level."""
    values = DATA[data](size // VALUE_BYTES)
    calls = select_calls(values, selected(Fraction(share).limit_denominator(10**6), len(values)))
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append([seconds_of(call) * 1e6])
    found = {name: summarise(seconds) for name, seconds in samples.items()}
    read, topk = found.pop(READ), found.pop(TORCH)
    return [
        {
            "data": data,
            "level": level,
            "size_bytes": size,
            "share": share,
            "gb_s": size / summary.time_us / 1e3,
            "read_gb_s": size / read.time_us / 1e3,
            "of_two_reads": 2 * read.time_us / summary.time_us,
            "beside_torch": topk.time_us / summary.time_us,
            "spread": max(summary.spread, read.spread, topk.spread),
        }
        for level, summary in found.items()
    ]


def select_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of one size and kind of data."""
    first = rows[0]
    about = f"{format_size(first['size_bytes'])}, {first['data']}, the largest {first['share']:.2%}"
    return [
        f"# {about}: one read {first['read_gb_s']:.1f} GB/s",
        "#  level   GB/s  of two reads (%)  beside torch.topk  spread (%)",
        *(
            f"{row['level']:>8} {row['gb_s']:6.2f} {100 * row['of_two_reads']:17.0f} {row['beside_torch']:17.1f}x "
            f"{100 * row['spread']:11.0f}"
            for row in rows
        ),
    ]


def size_of(text: str) -> int:
    """The bytes of some float32 values."""
    size = parse_size(text)
    if size < VALUE_BYTES or size % VALUE_BYTES:
        raise argparse.ArgumentTypeError(f"{text}: use a multiple of {VALUE_BYTES} bytes, the length of a float32")
    return size


def share_of(text: str) -> float:
    """The share of the values that are selected."""
    if not 0 < float(text) <= 0.5:
        raise argparse.ArgumentTypeError(f"{text}: use above 0, and at most 0.5")
    return float(text)


def main(words: Sequence[str] | None = None) -> None:
    parser = options(__doc__, only=("codec", "select"), rounds=7)
    parser.add_argument("--sizes", nargs="+", type=size_of, default=[256 << 10, 64 << 20], help="of the float32 values")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    levels = kernels.kernel_levels()
    parser.add_argument("--levels", nargs="+", choices=levels, default=levels, help="instruction sets, for the codecs")
    parser.add_argument("--share", type=share_of, default=0.01, help="of the values that are selected")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(words)
    facts, results = machine.facts(), {"codec": list[dict[str, Any]](), "select": list[dict[str, Any]]()}
    with one_core() as core:
        known = "{cpu}, {kernel}, torch {torch}, commlayer {commlayer}, load average {load_average}".format(**facts)
        print(f"# core {core} of {facts['cores']}, {known}; medians of {given.rounds} rounds", flush=True)
        for size in given.sizes:
            for name in given.only or results:
                measured = (
                    [codec_rows(size, given.codecs, given.levels, given.rounds)]
                    if name == "codec"
                    else (select_rows(size, data, given.share, given.rounds) for data in DATA)
                )
                for rows in measured:
                    print(*(codec_table if name == "codec" else select_table)(rows), sep="\n", flush=True)
                    results[name] += rows
    if given.json is not None:
        document = {"command": sys.argv, "machine": facts, "rounds": given.rounds, "results": results}
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
