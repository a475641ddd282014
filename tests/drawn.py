"""Tests whose ranks draw the same programs."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def alike(count: int) -> settings:
    """Each rank, a process, draws the same `count` examples in the same order. So nothing depends on the rank, on
    earlier runs or on the time, no example is dropped or made smaller, and each run of the test draws the same."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
