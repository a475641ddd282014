"""Steps of a phase, and their spread."""

from commlayer.tools.headroom.timing import Timing, phase_steps, share_interval, timing
from commlayer.tools.job.record import Record
from tests.unit.headroom.trials import blocks


def test_the_first_step_of_a_block_does_not_count() -> None:
    record = Record(0, blocks(("real", [1, 2]), ("none", [5]), ("real", [3])))
    assert [step.seconds for step in phase_steps(record, "real")] == [1, 2, 3]
    assert [step.seconds for step in phase_steps(record, "none")] == [5]
    assert phase_steps(record, "short") == []


def test_a_step_combines_the_ranks() -> None:
    records = [Record(rank, blocks(("none", times))) for rank, times in enumerate(([1, 5, 3], [2, 4, 9]))]
    found = timing(records, "none", max)
    assert found == Timing((2, 5, 9))
    assert found is not None
    assert found.median_s == 5
    assert found.quartiles_s == (3.5, 7)
    assert timing(records, "short", max) is None
    assert Timing((2.0,)).quartiles_s == (2, 2)


def test_the_interval_tells_noise_from_gain() -> None:
    noise = Timing((0.9, 1.0, 1.1, 0.8, 1.2, 1.0, 0.9, 1.1))
    low, high = share_interval(noise, noise)
    assert low < 0 < high
    assert share_interval(Timing((2.0,) * 8), Timing((1.0,) * 8)) == (0.5, 0.5)
    low, high = share_interval(Timing(tuple(2 * step_s for step_s in noise.steps_s)), noise)
    assert 0.3 < low < 0.5 < high < 0.7
