"""Made-up results of `bench/stress.py`, for the tests of its claims and tables."""

from typing import Any

BARE, HOOK = "commlayer:loss_bound=0.01:treatment=rescale", "commlayer:loss_bound=0.01"


def run_of(**figures: tuple[str, float, float]) -> dict[str, Any]:
    """Each figure: a backend, its p50 and its p99 in ms."""
    results = [
        {
            "backend": backend,
            "p50_us": p50 * 1e3,
            "p99_us": p99 * 1e3,
            "wrong": 0,
            "link_share": p50,
            "not_counted": 0.0,
        }
        | {"samples": 2, "spread": 0.0, "packets": {}}
        for backend, p50, p99 in figures.values()
    ]
    return {"results": results}
