"""The short exchanges of each step go ahead of gradients, but are not urgent: after an urgent operation the engine
keeps queues and naps short for a second, which costs some of the link."""

from __future__ import annotations

from collections import Counter

import pytest

import commlayer
from commlayer.frontend.work.context import AHEAD
from commlayer.transport.flight import recorder
from tests import ranks
from tests.drift import directions, hooked, step_of
from tests.process.test_local_exact import exact, sgd
from tests.process.test_local_steps import Net, train
from tests.process.test_within import host_of

STEPS = 4
NOT_URGENT = 2
"""The most urgent of the other classes (CL_CLASSES_URGENT in native/congestion/class.h)."""


def ahead() -> Counter[str]:
    """How many collectives of this process had the class AHEAD, by the first word of their label. None was urgent."""
    calls = [call for record in recorder.groups() for call in record.calls.collectives]
    assert not [call.label for call in calls if call.priority is not None and call.priority < NOT_URGENT]
    return Counter(call.label.split()[0] for call in calls if call.priority == AHEAD)


@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_of_exact_steps(rank: int, size: int) -> None:
    model = Net()
    optimizer = sgd(model)
    with exact(model, optimizer, samples=lambda: 1 + rank):
        train(model, optimizer, rank, range(STEPS))
        found = ahead()
    assert found["exact"] >= 2 * STEPS  # heads and flags
    assert found["order"] == 1


@pytest.mark.parametrize(("per_host", "labels"), [(1, {"samples"}), (2, {"samples", "within"})])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_of_the_hook(rank: int, size: int, per_host: int, labels: set[str]) -> None:
    within = None if per_host == 1 else host_of(rank, size, per_host)
    model, _ = hooked(commlayer.Policy(), within=within, samples=lambda: 1 + rank)
    for step in range(STEPS):
        step_of(model, directions(rank, step))
    found = ahead()
    assert set(found) == labels
    assert all(count >= STEPS for count in found.values())
