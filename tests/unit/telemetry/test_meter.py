from __future__ import annotations

import time
from typing import Any

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
