"""Values that ranks have told each other, and that should be alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def usual(values: Sequence[Any]) -> int:
    """The first index of the most frequent value; of equally frequent ones the first counts."""
    return max(range(len(values)), key=lambda at: (values.count(values[at]), -at))


def odd_ones(values: Sequence[Any]) -> list[int]:
    """The indices whose value is not the `usual` one."""
    if all(value == values[0] for value in values):
        return []
    most = values[usual(values)]
    return [at for at, value in enumerate(values) if value != most]
