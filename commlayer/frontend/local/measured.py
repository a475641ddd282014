"""`Measured`: what exact steps tell of the link and of the step, from which `every="auto"` takes H."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...plans.codec import VALUE_BYTES
from .turns import least_every

PRICE = 0.25
"""Local steps take up to about a quarter more steps to a loss (docs/local_bench.md): where the latency of an average,
which exact steps cannot hide, is more than this share of a step, they pay."""


class Measured(NamedTuple):
    """The measured terms of H*, see `least_every`."""

    sites: int
    values: int
    """Those that a rank sends: its site's, or its shard of them."""
    value_bytes: float
    """Bytes of a value on one of its two ways, in the codec of local steps."""
    rate: float
    """Bytes per second that a rank sends, and receives as many, in an average."""
    latency_s: float
    """Seconds that an average takes beside the time of its bytes."""
    step_s: float
    """Seconds of a step without the average."""
    fragments: int
    """The most fragments of local steps."""

    @classmethod
    def of(
        cls, sites: int, values: int, value_bytes: float, whole_s: float, part_s: float, step_s: float, fragments: int
    ) -> Measured:
        """From the seconds of an average of all values in float32, and of the bytes of a fragment in its codec."""
        passed = 2 * (sites - 1) / sites * values  # a site's link passes so many values in an average
        whole, part = passed * VALUE_BYTES, passed * value_bytes / fragments
        rate = (whole - part) / (whole_s - part_s) if whole_s > part_s and whole > part else whole / max(whole_s, 1e-9)
        rate = rate or math.inf  # of one site, whose link passes nothing
        return cls(sites, values, value_bytes, rate, max(part_s - part / rate, 0.0), step_s, fragments)

    @property
    def every(self) -> int:
        """H*, and at least 2 where exact steps would wait long for the latency alone."""
        least = least_every(self._bytes_s(self.value_bytes), self.latency_s, self.step_s, self.fragments)
        return max(least, 2) if least and self.latency_s > PRICE * self.step_s else least

    @property
    def average_s(self) -> float:
        """Seconds of an average in float32 that nothing hides."""
        return self.latency_s + self._bytes_s(VALUE_BYTES)

    def _bytes_s(self, value_bytes: float) -> float:
        return 2 * (self.sites - 1) / self.sites * self.values * value_bytes / self.rate

    def __str__(self) -> str:
        return (
            f"measured: {self.rate * 8e-6:.3g} Mbit/s, {self.latency_s * 1e3:.3g} ms of latency, "
            f"{self.step_s * 1e3:.3g} ms per step; {self.values} values of {self.value_bytes:.3g} bytes each between "
            f"{self.sites} sites: H* = {self.every}"
        )
