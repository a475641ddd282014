import statistics

import pytest

from bench.harness.equivalence import Equivalence, t_probability, t_quantile

# One-sided 95 % quantiles of Student's t.
T95 = {1: 6.3138, 2: 2.9200, 3: 2.3534, 4: 2.1318, 5: 2.0150, 10: 1.8125, 11: 1.7959, 12: 1.7823, 30: 1.6973}


@pytest.mark.parametrize("degrees", T95)
def test_quantiles_are_those_of_the_tables(degrees: int) -> None:
    assert t_quantile(0.95, degrees) == pytest.approx(T95[degrees], abs=1e-4)
    assert t_probability(T95[degrees], degrees) == pytest.approx(0.95, abs=1e-5)
    assert t_probability(-T95[degrees], degrees) == pytest.approx(0.05, abs=1e-5)


def differences(mean: float, deviation: float) -> list[float]:
    """Twelve with this mean and sample deviation."""
    plain = [float(i) for i in range(12)]
    spread = statistics.stdev(plain)
    return [mean + deviation * (value - 5.5) / spread for value in plain]


def test_interval_and_p_value() -> None:
    found = Equivalence.of(differences(0.001, 0.006), 0.005)
    error = 0.006 / 12**0.5
    assert found.mean == pytest.approx(0.001)
    assert found.error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx((0.001 - 1.7959 * error, 0.001 + 1.7959 * error), rel=1e-4)
    assert found.p == pytest.approx(1 - t_probability(0.004 / error, 11))


@pytest.mark.parametrize("mean", [-0.01, -0.0049, -0.003, 0.0, 0.002, 0.0045, 0.007])
@pytest.mark.parametrize("deviation", [0.0, 0.001, 0.004, 0.02])
def test_it_is_shown_if_the_interval_lies_within_the_margin(mean: float, deviation: float) -> None:
    found = Equivalence.of(differences(mean, deviation), 0.005)
    assert found.shown == (found.low > -0.005 and found.high < 0.005)
    assert not (found.shown and found.differs(0.005))


def test_it_can_fail() -> None:
    assert Equivalence.of(differences(0.0, 0.004), 0.005).shown
    noisy, shifted = Equivalence.of(differences(0.0, 0.02), 0.005), Equivalence.of(differences(0.02, 0.004), 0.005)
    assert not noisy.shown
    assert not noisy.differs(0.005)  # too few runs to tell
    assert not shifted.shown
    assert shifted.differs(0.005)
    assert Equivalence.of(differences(-0.02, 0.004), 0.005).differs(0.005)


def test_one_difference_is_refused() -> None:
    with pytest.raises(ValueError, match="1 paired difference: a t-test needs 2 at least"):
        Equivalence.of([0.1], 0.005)
