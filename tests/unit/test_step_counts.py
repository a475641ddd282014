import collections
import gc

from commlayer.telemetry.meter import Exposure, Meter
from commlayer.transport.flight import Recorder
from commlayer.transport.step_counts import StepCounts


class Source:
    """An optimizer, or a hook. Those that are freed leave their memory to the next one."""

    steps = 1
    uncounted_bytes = 0
    policy = None


def test_steps_are_counted_by_source() -> None:
    counts, first, second = StepCounts(), Source(), Source()
    assert [counts.add(optimizer) for optimizer in (first, second, first)] == [(0, 1), (1, 1), (0, 2)]


def test_a_freed_optimizer_leaves_no_steps_to_one_that_gets_its_memory() -> None:
    counts, recorder, meter, addresses = StepCounts(), Recorder(), Meter(), set()
    for _ in range(100):
        source = Source()
        addresses.add(id(source))
        assert counts.add(source)[1] == 1
        recorder.note_step(source)
        meter.optimizer_steps(source)
        meter.hook_steps(source)
        del source
        gc.collect(0)
    assert len(addresses) < 100  # else nothing was tried
    assert len(counts._counts) == 0
    assert [step["number"] for step in recorder._frozen_steps()] == [1]
    marks = collections.Counter((mark.source, mark.is_hook) for mark in meter._marks)
    assert (len(marks), max(marks.values())) == (200, 1)


def test_the_record_has_the_steps_of_the_optimizer_that_makes_most_of_those_kept() -> None:
    recorder, often, seldom = Recorder(), Source(), Source()
    for source in (often, seldom, often):
        recorder.note_step(source)
    assert [step["number"] for step in recorder._frozen_steps()] == [1, 2]


def test_exposure_follows_the_optimizer_that_lives() -> None:
    meter, exposure = Meter(), Exposure()
    for _ in range(3):
        meter.optimizer_steps(Source())
    living = Source()
    for _ in range(2):
        meter.optimizer_steps(living)
    exposure.update(meter, [])
    assert exposure.step == 2
