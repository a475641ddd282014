"""Predictions for the systems of the pipeline benchmark, against arithmetic by hand.

The case: p = 4, M = 16, v = 4, a chunk's forward is a quarter second; C = 44.79 s of reductions.
"""

import dataclasses

import pytest

from bench.jobs.pipeline_model import exposed, ideal, order_of, predict, reduction_s
from bench.jobs.pipelines import (
    BUCKETS,
    CONTROL,
    DEFERRED,
    FIFO,
    FIFO_CUBIC,
    FIFO_GLOO,
    FSDP_INTERLEAVED,
    FSDP_LOOPED,
    SERIAL,
    STALE,
    SYSTEMS,
    UNDEFERRED,
)
from bench.overlap_pipeline import LARGE
from commlayer.scheduler.actions import actions_of

UNIT = dataclasses.replace(LARGE, forward_s=0.25)
COSTS = ideal(UNIT)


@pytest.mark.parametrize(
    ("name", "step_s"),
    [
        (SERIAL, 101.79),
        (BUCKETS, 101.79 - 1.5),  # the first of 4 buckets starts 3/4 of a backward pass before the end
        (FIFO, 71.04),
        (FIFO_GLOO, 71.04),
        (FIFO_CUBIC, 71.04),
        (UNDEFERRED, 71.04),
        (DEFERRED, 61.45),
        (STALE, 50.25),
        (CONTROL, 50.25),
    ],
)
def test_steps_on_an_ideal_network(name: str, step_s: float) -> None:
    assert predict(UNIT, name, COSTS).step_s == pytest.approx(step_s, abs=0.005)


def test_reductions() -> None:
    assert reduction_s(UNIT, COSTS) == pytest.approx(44.79, abs=0.005)
    assert UNIT.reduction_s == pytest.approx(44.79, abs=0.005)
    assert exposed(UNIT, 71.04, 50.25, COSTS) == pytest.approx(0.464, abs=0.0005)


def test_fsdp_gathers_a_stage_again_after_torch_has_dropped_it() -> None:
    """Breadth first, 4 stages and room for 3: forward 0 1 2 3, backward 3 2 1 0, so stage 0 is gathered twice."""
    actions = order_of(UNIT, SYSTEMS[FSDP_LOOPED])[1]
    gathers = [a.stage for a in actions if a.kind == "REDUCE" and a.part > 0]
    assert sorted(gathers) == [1, 1, 5, 9, 13]
    reduced = [a.stage for a in actions if a.kind == "REDUCE" and a.part == 0]
    assert reduced == [13, 9, 5, 1]
    assert all(a.parts == 2 for a in actions if a.kind in ("REDUCE", "WAIT"))
    computed = [a for a in actions if a.kind in ("F", "B")]
    assert computed == [a for a in actions_of(order_of(UNIT, SYSTEMS[CONTROL]))[1] if a.kind in ("F", "B")]


def test_fsdp_waits_for_gathers_and_reductions() -> None:
    """Slower than an asynchronous reduction, and the more the more often stages are gathered."""
    looped, interleaved = (predict(UNIT, name, COSTS).step_s for name in (FSDP_LOOPED, FSDP_INTERLEAVED))
    assert predict(UNIT, FIFO, COSTS).step_s < looped < interleaved


def test_parameters_fill_the_link() -> None:
    from bench.overlap_pipeline import scenario_of

    scenario = scenario_of(LARGE)
    assert scenario.hosts == 8
    assert scenario.payload_gb_s is not None
    sent = 4 * LARGE.values(scenario) * 2 * (LARGE.replicas - 1) / LARGE.replicas
    assert LARGE.chunks * sent / (scenario.payload_gb_s * 1e9) == pytest.approx(LARGE.reduction_s, rel=1e-3)
