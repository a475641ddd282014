"""Rates and times in three digits."""

from __future__ import annotations


def rate_text(rate_bps: float) -> str:
    """A rate in three digits."""
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if rate_bps >= 0.9995 * unit:
            return f"{rate_bps / unit:.3g} {name}" if rate_bps < 999.5 * unit else f"{rate_bps / unit:.0f} {name}"
    return f"{rate_bps / 1e3:.3g} kbit/s"


def time_text(microseconds: float) -> str:
    """A time in three digits."""
    return f"{microseconds / 1e3:.3g} ms" if microseconds >= 999.5 else f"{microseconds:.3g} us"
