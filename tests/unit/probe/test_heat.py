import math

from commlayer.tools.probe import heat
from tests.unit.probe.samples import view


def test_of_several_paths_the_worst_is_shown() -> None:
    samples = view(2, 2).samples
    for sample in samples:
        if sample.way.source_nic == "eth0":
            sample.rate_bps, sample.lost = sample.rate_bps / 2, 20
        sample.is_reached = sample.way.source == 0
    for order in (samples, samples[::-1]):
        rates = heat.cells(2, order, lambda path: path.rate_bps / 1e6, min)
        losses = heat.cells(2, order, lambda path: 100 * path.loss, max)
        assert (rates[0][1], losses[0][1]) == (50.0, 1.0)
        assert math.isnan(rates[1][0])
        assert math.isnan(rates[0][0])
