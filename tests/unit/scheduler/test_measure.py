"""Costs from recorded actions and timed transfers."""

import pytest

from commlayer.errors import ConfigError
from commlayer.scheduler.actions import Action
from commlayer.scheduler.measure import StageTimes, Timed, action_seconds, line, stage_times


def timed(kind: str, stage: int, microbatch: int, start_s: float, end_s: float) -> Timed:
    return Timed(Action(kind, stage, microbatch), start_s, end_s)  # type: ignore[arg-type]


def test_times_of_a_stage_are_medians() -> None:
    records = [timed("F", 2, i, 10 * i, 10 * i + seconds) for i, seconds in enumerate((1.0, 1.2, 9.0))]
    records += [timed("B", 2, i, 10 * i + 1, 10 * i + 1 + seconds) for i, seconds in enumerate((2.0, 2.5, 2.25))]
    records += [timed("F", 0, 0, 0, 0.5), timed("B", 0, 0, 5, 6), Timed(Action("WAIT", 0), 6, 100)]
    found = stage_times(records)
    assert list(found) == [0, 2]
    assert (found[2].forward_s, found[2].backward_s) == pytest.approx((1.2, 2.25))
    assert found[2].weight_s is None
    assert found[0] == StageTimes(0.5, 1)


def test_halves_of_a_backward_make_a_whole() -> None:
    split = [timed("F", 0, 0, 0, 1), timed("I", 0, 0, 1, 2.5), timed("W", 0, 0, 2.5, 3)]
    assert stage_times(split)[0] == StageTimes(1, 2, 0.5)
    assert stage_times([*split, timed("B", 0, 1, 3, 4.75)])[0] == StageTimes(1, 1.75, 0.5)


@pytest.mark.parametrize("kinds", ["F", "B", "FI", "FW"])
def test_a_stage_without_a_whole_micro_batch_is_refused(kinds: str) -> None:
    with pytest.raises(ConfigError, match="stage 3: recorded"):
        stage_times([timed(kind, 3, 0, i, i + 1) for i, kind in enumerate(kinds)])


def test_the_overhead_of_an_action_is_without_waiting() -> None:
    """Gaps of 1, 1, 2 and 50 (a wait): the lower quartile."""
    starts = [0, 11, 22, 34, 94]
    records = [timed("F", 0, i, start, start + 10) for i, start in enumerate(starts)]
    assert action_seconds(records) == 1
    assert action_seconds(records[:1]) == 0
    assert action_seconds(records[:2]) == 1
    overlapping = [timed("F", 0, i, start, start + 12) for i, start in enumerate((0, 11, 22))]
    assert action_seconds(overlapping) == 0


def test_a_line_gives_latency_and_rate() -> None:
    found = line({1000: [0.011, 0.012, 0.5], 2000: [1.0], 9000: [0.091, 0.092, 0.093]})
    assert found == pytest.approx((0.002, 1e-5))


def test_noise_does_not_make_a_latency_or_a_rate_negative() -> None:
    assert line({1000: [0.2], 4000: [0.1]}) == pytest.approx((0.2, 2.5e-5))
    assert line({1000: [0.001], 2000: [0.004]}).latency_s == 0


def test_one_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 sizes"):
        line({1000: [0.2], 2000: []})
