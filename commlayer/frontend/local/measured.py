"""`Measured`: what exact steps tell of the link and of the step, from which `every="auto"` takes H."""

from __future__ import annotations

from typing import NamedTuple

from ...plans.codec import VALUE_BYTES
from .turns import least_every


class Measured(NamedTuple):
    """The measured terms of H*, see `least_every`."""

    sites: int
    values: int
    """Those that a rank sends: its site's, or its shard of them."""
    value_bytes: float
    """Bytes of a value on one of its two ways, in the codec of local steps."""
    rate: float
    """Bytes per second that a rank sends, and receives as many, in an average."""
    step_s: float
    """Seconds of a step without the average."""

    @property
    def every(self) -> int:
        """H*."""
        return least_every(self.sites, self.values, self.value_bytes, self.rate, self.step_s)

    @property
    def average_s(self) -> float:
        """Seconds of an average in float32 that nothing hides."""
        return 2 * (self.sites - 1) / self.sites * self.values * VALUE_BYTES / self.rate

    def __str__(self) -> str:
        return (
            f"measured: {self.rate * 8e-6:.3g} Mbit/s, {self.step_s * 1e3:.3g} ms per step; {self.values} values of "
            f"{self.value_bytes:.3g} bytes each between {self.sites} sites: H* = {self.every}"
        )
