"""Which gradients are reduced when, and how long a step takes."""

from __future__ import annotations

from .actions import Action, Reduction
from .link import Network
from .simulate import Simulation, StageCosts, simulate

__all__ = ["Action", "Network", "Reduction", "Simulation", "StageCosts", "simulate"]
