"""The outcome of one test of torch, and the outcomes of two backends side by side."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

KNOWN = {
    "test_ddp_profiling_torch_profiler": "our events are there, but only C++ can mark an event asynchronous",
}
"""Differences that stay, and why: tests that pass with gloo and not with ours."""


@dataclass(frozen=True)
class Outcome:
    """One test in one world on one backend."""

    gate: str
    backend: str
    world: int
    test: str
    outcome: str
    """passed, failed or skipped."""
    detail: str
    """Why it failed or was skipped."""
    seconds: float


def read(paths: Iterable[Path]) -> list[Outcome]:
    """The outcomes in these files of `world.py`."""
    return [Outcome(**fields) for path in paths for fields in json.loads(path.read_text(encoding="utf-8"))]


@dataclass(frozen=True)
class Difference:
    """A test that two backends do not agree on."""

    world: int
    test: str
    reference: str
    """How it ended on the reference backend."""
    ours: str
    """How it ended on ours, or "missing"."""
    detail: str

    @property
    def is_failure(self) -> bool:
        """Whether it counts: it passes with the reference, and there is no reason known for the difference."""
        return self.reference == "passed" and self.test not in KNOWN


def last(outcomes: Iterable[Outcome], backend: str) -> dict[tuple[int, str], Outcome]:
    """Each world's and test's outcome behind the last gate that it came to."""
    return {(outcome.world, outcome.test): outcome for outcome in outcomes if outcome.backend == backend}


def differences(outcomes: list[Outcome], reference: str, ours: str) -> Iterator[Difference]:
    """The differences, in order of world and test."""
    found = last(outcomes, ours)
    for (world, test), expected in sorted(last(outcomes, reference).items()):
        actual = found.get((world, test))
        outcome, detail = (actual.outcome, actual.detail) if actual else ("missing", "")
        if outcome != expected.outcome:
            yield Difference(world, test, expected.outcome, outcome, detail)


def table(outcomes: list[Outcome], backends: list[str]) -> str:
    """Counts by gate and world, then the skipped tests with their reasons."""
    by_backend = {backend: last(outcomes, backend) for backend in backends}
    lines = ["gate  world  " + "  ".join(f"{backend + ': passed, failed, skipped':>36}" for backend in backends)]
    places = sorted({(outcome.gate, outcome.world) for outcome in outcomes})
    for gate, world in places:
        cells = []
        for backend in backends:
            here = [
                outcome for outcome in by_backend[backend].values() if (outcome.gate, outcome.world) == (gate, world)
            ]
            counts = Counter(outcome.outcome for outcome in here)
            cells.append(f"{counts['passed']:>20}{counts['failed']:>8}{counts['skipped']:>8}")
        lines.append(f"{gate:5} {world:5}  " + "  ".join(cells))
    reasons = Counter(outcome.detail for outcome in by_backend[backends[-1]].values() if outcome.outcome == "skipped")
    lines += ["", f"skipped with {backends[-1]}, in all worlds:"]
    lines += [f"{count:5}  {reason.strip()}" for reason, count in reasons.most_common()]
    return "\n".join(lines)
