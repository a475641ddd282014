import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.tools.bench.samples import percentile, summarise


def test_percentile_is_the_nearest_rank() -> None:
    samples = [float(value) for value in range(100, 0, -1)]
    assert percentile(samples, 50) == 50
    assert percentile(samples, 99) == 99
    assert percentile(samples, 100) == 100
    assert percentile(samples, 7) == 7


def test_percentile_of_few_samples_is_the_maximum() -> None:
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0


@given(st.lists(st.floats(0, 1e9), min_size=1), st.floats(0.1, 100))
def test_percentile_covers_its_share(samples: list[float], percent: float) -> None:
    value = percentile(samples, percent)
    assert value in samples
    assert sum(sample <= value for sample in samples) / len(samples) >= percent / 100 - 1e-9


@pytest.mark.parametrize(("samples", "percent"), [([], 50.0), ([1.0], 0.0), ([1.0], 101.0)])
def test_percentile_rejects(samples: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(samples, percent)


def test_summary_is_the_median_over_rounds_of_means() -> None:
    summary = summarise([[1.0, 3.0], [10.0, 10.0], [100.0, 300.0]])
    assert summary.rounds_us == (2.0, 10.0, 200.0)
    assert summary.time_us == 10.0
    assert summary.spread == pytest.approx(198 / 10)
    assert (summary.min_us, summary.p50_us, summary.p99_us, summary.max_us) == (1.0, 10.0, 300.0, 300.0)
    assert summary.mean_us == pytest.approx(424 / 6)
    assert summary.samples == 6


def test_one_slow_round_does_not_move_the_time() -> None:
    assert summarise([[5.0], [5.0], [5000.0]]).time_us == 5.0


@pytest.mark.parametrize("rounds", [[], [[]], [[1.0], []]])
def test_empty_rounds_are_rejected(rounds: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="round"):
        summarise(rounds)
