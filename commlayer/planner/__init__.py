"""Plans for a training job, from measured costs: pure functions without tensors or communication (docs/planner.md)."""

from __future__ import annotations

from .costs import Costs, Layer, Link
from .partition import Limits, Partition, partition
from .plan import Plan
from .search import Plans, search
from .slices import Slices, slices

__all__ = [
    "Costs",
    "Layer",
    "Limits",
    "Link",
    "Partition",
    "Plan",
    "Plans",
    "Slices",
    "partition",
    "search",
    "slices",
]
