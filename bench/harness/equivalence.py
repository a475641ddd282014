"""`Equivalence`: two one-sided t-tests (TOST) of the mean of paired differences (Schuirmann, 1987).

"No difference found" may only mean too few runs. Equivalence is shown if both "the mean is -margin or less" and "the
mean is margin or more" are rejected; that is the case if the 90 % interval of the mean lies within the margin.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.05
"""The level of each of the two tests."""


class Equivalence(NamedTuple):
    """The result of the tests."""

    mean: float
    error: float
    """Standard error of the mean."""
    low: float
    """The 90 % interval of the mean, from here ..."""
    high: float
    """... to here."""
    p: float
    """The larger p-value of the two tests."""

    @property
    def shown(self) -> bool:
        return self.p < LEVEL

    def differs(self, margin: float) -> bool:
        """Whether the interval lies outside of the margin, so that the opposite is shown."""
        return self.low > margin or self.high < -margin

    @classmethod
    def of(cls, differences: Sequence[float], margin: float) -> Equivalence:
        """The test of at least two differences. Raises ValueError for fewer."""
        count = len(differences)
        if count < 2:
            raise ValueError(f"{count} paired difference: a t-test needs 2 at least")
        mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(count)
        half = t_quantile(1 - LEVEL, count - 1) * error
        inside = (margin - abs(mean)) / error if error else math.copysign(math.inf, margin - abs(mean))
        p = 1 - t_probability(inside, count - 1)
        return cls(mean, error, mean - half, mean + half, p)


def t_probability(t: float, degrees: int) -> float:
    """P(T <= t) of Student's t with whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for i in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (i - 1) / i
    between = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + between / 2


def t_quantile(probability: float, degrees: int) -> float:
    """The t at which `t_probability` is `probability`, above 0.5."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < probability else (low, middle)
    return low
