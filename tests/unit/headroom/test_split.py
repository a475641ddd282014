"""The parts of a step, from trials made by hand."""

from dataclasses import replace

import pytest

from commlayer.tools.headroom.split import split
from tests.unit.headroom.trials import job, on_engine, trial


def test_the_parts_of_a_step() -> None:
    as_is = job()
    found = split(as_is, as_is, on_engine())
    assert found.all_s == pytest.approx(0.6)  # 1.0 less the slowest rank's 0.4
    assert found.share == pytest.approx(0.6)
    assert found.share_interval == pytest.approx((0.6, 0.6))
    assert found.bytes_s == pytest.approx(0.5)
    assert found.latency_s == pytest.approx(0.1)
    assert found.overlap_s == pytest.approx(0.8 - 0.4 - 0.5 / 3)  # 3 operations are in flight for 0.5
    assert found.transport_s == pytest.approx(0.2)
    assert found.stragglers_s == pytest.approx(0.1)  # the slowest rank's 0.4 less the other's 0.3
    assert found.straggler.rank == 1
    assert found.loss_s == 0
    engine = found.engine
    assert engine is not None
    assert (engine.operations, engine.nbytes) == (3, 3000)
    assert (engine.transfer_s, engine.waited_s) == pytest.approx((0.5, 0.05))
    assert engine.round_trip_s == pytest.approx(200e-6)
    assert engine.late_rank is None


def test_an_engine_that_carried_nothing_tells_nothing() -> None:
    """Such is a job with `cpu:gloo,cuda:nccl`."""
    as_is = job()
    idle = on_engine()
    records = [
        replace(record, steps=tuple(replace(step, collectives=0) for step in record.steps)) for record in idle.records
    ]
    assert split(as_is, as_is, trial(*records)).engine is None


def test_overlap_cannot_beat_computation() -> None:
    as_is = job()
    assert split(as_is, as_is, on_engine(in_flight_s=(0.03, 0.03))).overlap_s == pytest.approx(0.8 - 0.4 - 0.01)
    assert split(as_is, as_is, on_engine(in_flight_s=(0.7, 0.7))).overlap_s == pytest.approx(0.8 - 0.7)


def test_what_commlayer_reached_is_possible() -> None:
    as_is = job()
    found = split(as_is, as_is, on_engine(0.3))
    assert found.all_s == found.transport_s == pytest.approx(0.7)
    assert found.latency_s == pytest.approx(0.2)


def test_a_job_on_commlayer_has_no_short_messages() -> None:
    """Those of gloo, which take long here, say nothing about it."""
    as_is = on_engine()
    found = split(as_is, job(short=9.0), as_is)
    assert found.is_on_engine
    assert found.all_s == pytest.approx(0.4)
    assert found.latency_s == pytest.approx(3 * 200e-6)
    assert found.bytes_s == pytest.approx(0.4 - 3 * 200e-6)
    assert found.transport_s is None


def test_nothing_is_won_where_steps_are_equal() -> None:
    as_is = job(real=0.4, short=0.41, none=(0.42, 0.41))
    found = split(as_is, as_is, on_engine(0.5))
    assert (found.all_s, found.bytes_s, found.latency_s, found.overlap_s) == (0, 0, 0, 0)
    assert found.transport_s == pytest.approx(-0.1)  # commlayer is slower there, and that is said


def test_what_was_not_measured_is_unknown() -> None:
    as_is = job()
    found = split(as_is, as_is, None)
    assert (found.overlap_s, found.transport_s, found.engine) == (None, None, None)
    assert split(as_is, as_is, job()).engine is None  # a trial that did not use the engine


@pytest.mark.parametrize("where", ["tcp", "engine"])
def test_lost_packets_are_a_part(where: str) -> None:
    as_is = job(tcp={"sent": 1000, "resent": 5} if where == "tcp" else {})
    lost = {"packets_sent": 1000, "packets_lost": 6 if where == "engine" else 1, "packets_spurious": 1}
    found = split(as_is, as_is, on_engine(counters=lost))
    assert found.is_lossy
    assert found.loss_s == pytest.approx(0.2)
    assert split(as_is, as_is, None).loss_s == (None if where == "tcp" else 0)


def test_the_late_rank_has_a_name() -> None:
    as_is = job()
    engine = split(as_is, as_is, on_engine(lags_s={1: 0.5, 0: 0.1})).engine
    assert engine is not None
    assert engine.late_rank == 1
    assert engine.late_share == pytest.approx(0.5 / 0.6)
    assert engine.late_s == pytest.approx(0.05 * 0.5 / 0.6 * 2)


def test_a_job_whose_communication_stayed_is_an_error() -> None:
    with pytest.raises(ValueError, match="could not be left out"):
        split(job(), on_engine(), None)
