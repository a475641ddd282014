"""Sizes in text: 4K is 4096 bytes."""

from __future__ import annotations

import math
import re

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes from "4096", "4K", "8M", "1G" (powers of 1024, as in nccl-tests; "KB" and "KiB" mean the same).

    Raises ValueError on anything else, and when the result is not a whole number of bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise ValueError(f"size {text!r}: expected a number of bytes such as 4096, 4K, 8M or 1G")
    size_bytes = float(match[1]) * _BINARY[match[2]]
    if size_bytes != int(size_bytes):
        raise ValueError(f"size {text!r} is {size_bytes} bytes: expected a whole number")
    return int(size_bytes)


def format_size(size_bytes: int) -> str:
    """The shortest text that `parse_size` reads as this size: "4K" for 4096, "4097" for 4097."""
    for unit in ("G", "M", "K"):
        if size_bytes and size_bytes % _BINARY[unit] == 0:
            return f"{size_bytes // _BINARY[unit]}{unit}"
    return str(size_bytes)


def sweep(min_bytes: int, max_bytes: int, *, factor: float = 2.0, step_bytes: int = 0) -> list[int]:
    """Sizes from `min_bytes` up to and including `max_bytes`, growing by `factor`, or by `step_bytes` if not 0.

    Raises ValueError if the sweep would be empty or would not grow.
    """
    if not 0 < min_bytes <= max_bytes:
        raise ValueError(f"sizes {min_bytes} to {max_bytes}: expected 0 < min <= max")
    if step_bytes < 0 or (step_bytes == 0 and not 1 < factor < math.inf):
        raise ValueError(f"factor {factor} and step {step_bytes}: sizes would not grow; use factor > 1 or step > 0")
    sizes = [min_bytes]
    while True:
        # max(): a factor close to 1 must also enlarge a small size
        size = sizes[-1] + step_bytes if step_bytes else max(sizes[-1] + 1, int(sizes[-1] * factor))
        if size > max_bytes:
            return sizes
        sizes.append(size)
