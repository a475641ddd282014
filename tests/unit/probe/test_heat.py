import math

from commlayer.tools.probe import heat
from tests.unit.probe.samples import view


def test_of_several_paths_the_worst_is_shown() -> None:
    samples = view(2, 2).samples
    for each in samples:
        if each.way.source_nic == "eth0":
            each.rate_bps, each.lost = each.rate_bps / 2, 20
        each.is_reached = each.way.source == 0
    for order in (samples, samples[::-1]):
        rates = heat.cells(2, order, lambda each: each.rate_bps / 1e6, min)
        losses = heat.cells(2, order, lambda each: 100 * each.loss, max)
        assert (rates[0][1], losses[0][1]) == (50.0, 1.0)
        assert math.isnan(rates[1][0])
        assert math.isnan(rates[0][0])
