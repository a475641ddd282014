"""Plans for a training job, from measured costs: pure functions without tensors or communication (docs/planner.md)."""

from __future__ import annotations

from .cluster import Cluster, Links, Rank
from .costs import Costs, Layer, Link
from .layout import Layout
from .mesh import Mesh
from .parallelism import Parallelisms, parallelism
from .partition import Limits, Partition, partition
from .plan import Plan
from .prediction import Prediction
from .search import Plans, search
from .slices import Slices, slices
from .transformer import Transformer

__all__ = [
    "Cluster",
    "Costs",
    "Layer",
    "Layout",
    "Limits",
    "Link",
    "Links",
    "Mesh",
    "Parallelisms",
    "Partition",
    "Plan",
    "Plans",
    "Prediction",
    "Rank",
    "Slices",
    "Transformer",
    "parallelism",
    "partition",
    "search",
    "slices",
]
