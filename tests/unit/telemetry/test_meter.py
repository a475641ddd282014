import time
from typing import Any

import pytest

from commlayer.telemetry.meter import Exposure, Mark, Meter, tails
from commlayer.transport.base import Times
from commlayer.transport.call import Call, Calls


class Ended:
    """The handle of an operation that has ended."""

    def __init__(self, times: Times | None) -> None:
        self._times = times

    def times(self) -> Times | None:
        return self._times


def call(begin_s: float, end_s: float | None, **more: Any) -> Call:
    """An operation for which the training waits through a future. `end_s` None: it runs."""
    handle: Any = Ended(None if end_s is None else Times(begin_s, None, end_s))
    return Call("all_reduce", submitted_s=begin_s, handle=handle, **more)


class Hook:
    steps = 0
    uncounted_bytes = 0
    policy = None


def mark(at_s: float, number: int, *, hook: bool = True, source: int = 1, overlaps: bool = False) -> Mark:
    return Mark(source, hook, at_s, number, overlaps)


def test_a_tail_is_from_the_last_submission_to_the_last_end_of_its_step() -> None:
    marks = [mark(10, 0), mark(20, 1), mark(30, 2)]
    calls = [call(10.5, 15.0), call(11.0, 13.0), call(21.0, 22.0), call(31.0, 40.0), call(5.0, 50.0)]
    assert tails(marks, calls) == [4.0, 1.0]


def test_no_tail_where_python_waited_or_gradients_travel_in_the_next_forward_pass() -> None:
    marks = [mark(10, 0, overlaps=True), mark(20, 1), mark(30, 2)]
    assert tails(marks, [call(11, 19), call(21, 25, is_waited=True), call(22, None)]) == [0.0, 0.0]


def test_calls_that_return_when_they_have_ended_are_exposed_once() -> None:
    calls, exposure, meter = Calls(), Exposure(), Meter()
    exposure.update(meter, [calls])
    for _ in range(3):
        each = Call("all_reduce")
        calls.add(each)
        each.ended_s = each.submitted_s + 2.0
    for _ in range(2):
        exposure.update(meter, [calls])
    assert exposure.exposed_s == 6.0


def test_a_freed_group_leaves_no_counts_to_one_that_gets_its_memory() -> None:
    calls, exposure, meter = Calls(), Exposure(), Meter()
    calls.add(Call("all_reduce"))
    exposure.update(meter, [calls])
    assert len(exposure._last) == len(exposure._counts) == 1
    del calls
    assert len(exposure._last) == len(exposure._counts) == 0


def test_a_call_that_runs_counts_when_it_has_ended() -> None:
    calls, exposure, meter = Calls(), Exposure(), Meter()
    exposure.update(meter, [calls])
    running = Call("all_reduce")
    calls.add(running)
    exposure.update(meter, [calls])
    assert (exposure.exposed_s, exposure.oldest_s > 0) == (0.0, True)
    running.ended_s = running.submitted_s + 1.5
    exposure.update(meter, [calls])
    assert (exposure.exposed_s, exposure.oldest_s) == (1.5, 0.0)


def test_steps_of_a_hook_count_more_than_those_of_optimizers() -> None:
    meter, exposure = Meter(), Exposure()
    meter.turn_on()
    hook = Hook()
    for step in range(1, 4):
        hook.steps = step
        meter.hook_steps(hook)
        meter.optimizer_steps(exposure)
        meter.optimizer_steps(exposure)
    meter._marks.extend([mark(time.monotonic(), 99, hook=False, source=2)] * 8)
    exposure.update(meter, [])
    assert (exposure.steps, exposure.step) == (2, 3)
    meter.turn_off()


def test_steps_of_optimizers_count_without_a_hook() -> None:
    meter, exposure = Meter(), Exposure()
    for _ in range(3):
        meter.optimizer_steps(exposure)
    exposure.update(meter, [])
    assert (exposure.steps, exposure.step) == (2, 3)
    meter.optimizer_steps(exposure)
    exposure.update(meter, [])
    assert (exposure.steps, exposure.step) == (3, 4)


def test_waits_are_measured_while_the_meter_is_on() -> None:
    meter = Meter()
    with meter.waiting():
        time.sleep(0.01)
    assert meter.read()[0] == 0
    meter.is_on = True
    start_s = time.monotonic()
    with meter.waiting():
        time.sleep(0.01)
    assert 0.01 <= meter.read()[0] <= time.monotonic() - start_s


def sync(begin_s: float, end_s: float) -> Call:
    """A call that returned when its operation had ended."""
    return Call("all_reduce", submitted_s=begin_s, ended_s=end_s)


def test_exposure_is_that_of_whole_steps() -> None:
    """Steps of 1 s that wait for 0.43 s, looked at in mid-step: each look finds one step, and its own wait."""
    calls, exposure, meter = Calls(), Exposure(), Meter()
    exposure.update(meter, [calls])
    for step in range(4):
        meter._marks.append(mark(10.0 + step, step)._replace(waited_s=0.2 * step))
        each = sync(10.1 + step, 10.33 + step)
        calls.add(each)
        each.submitted_s = 10.1 + step
        exposure.update(meter, [calls])
        assert (exposure.steps, exposure.stepped_s) == (step, float(step))
        assert exposure.exposed_in_steps_s == pytest.approx(0.43 * step)


def test_waits_for_late_ranks_are_told_apart() -> None:
    """Three operations of 0.5 s in a step each wait 0.3 s for the last rank; the training waits for the tail."""
    calls, exposure, meter = Calls(), Exposure(), Meter()
    exposure.update(meter, [calls], 7.0)
    meter._marks.extend([mark(10.0, 0), mark(12.0, 1)])
    for begin_s in (10.1, 10.2, 10.3):
        each = call(begin_s, begin_s + 0.5)
        calls.add(each)
        each.submitted_s = begin_s
    exposure.update(meter, [calls], 7.0 + 3 * 0.3)
    assert exposure.exposed_in_steps_s == pytest.approx(0.5)
    assert exposure.late_in_steps_s == pytest.approx(0.3)


def test_without_steps_late_ranks_are_told_apart_too() -> None:
    calls, exposure, meter = Calls(), Exposure(), Meter()
    exposure.update(meter, [calls])
    each = Call("all_reduce")
    calls.add(each)
    each.ended_s = each.submitted_s + 2.0
    exposure.update(meter, [calls], 1.5)
    assert (exposure.exposed_s, exposure.late_s) == (2.0, 1.5)
    exposure.update(meter, [calls], 0.0)  # of a new engine
    exposure.update(meter, [calls], 1.0)  # hidden
    assert (exposure.exposed_s, exposure.late_s) == (2.0, 1.5)
