"""Which members differ from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def differing(told: Mapping[int, int]) -> set[int]:
    """Those that have told another number than most; among equally many, than the lowest member of them."""
    counts = Counter(told.values())
    usual = min(told, key=lambda member: (-counts[told[member]], member), default=-1)
    return {member for member, number in told.items() if number != told[usual]}
