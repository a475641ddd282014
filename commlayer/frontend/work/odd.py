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


def differing(values: Sequence[Any], ranks: Sequence[int]) -> str:
    """How values differ, by the ranks that told them: `4 on rank 0, 5 on rank 1`; empty if they do not."""
    odd = odd_ones(values)
    return ", ".join(f"{values[at]!r} on rank {ranks[at]}" for at in sorted({usual(values), *odd[:1]})) if odd else ""
