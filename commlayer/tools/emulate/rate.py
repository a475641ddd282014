"""Rates of links in text: 200M is 200 000 000 bit/s."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_RATE = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([kKmMgGtT]?)(?:(?i:bit)(?:/s)?|bps|b/s|b|(Bps|BPS|B/s|B))?")


def parse_rate(text: str) -> float:
    """Bits per second from "200M", "1G", "200mbit", "50 Mbit/s", "2.5Gbps", "200e6": powers of 1000, as for links.

    Raises ValueError, also on bytes per second ("25MB/s").
    """
    match = _RATE.fullmatch(text.strip())
    rate_bps = float(match[1]) * _UNITS[match[2].upper()] if match is not None else 0.0
    if match is None or not 0 < rate_bps < math.inf:
        raise ValueError(f"rate {text!r}: expected bits per second such as 200M, 1G or 200mbit")
    if match[3]:
        bits = f"{8 * float(match[1]):g}{match[2]}"
        raise ValueError(f"rate {text!r}: that is in bytes; write bits per second: {bits}")
    return rate_bps
