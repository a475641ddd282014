from __future__ import annotations

import json

from commlayer.tools.probe.sample import Sample, Way
from tests.unit.probe.samples import lose, sample

WAY = Way(0, "eth0", 1, "eth0")


def test_a_sample_survives_json() -> None:
    one = sample(WAY)
    lose(one)
    table = json.loads(json.dumps(one.table))
    assert Sample.from_table(table) == one
    assert table["loss"] == 0.02
    assert table["gilbert"]["bad_ends"] == 0.25


def test_a_second_pass_adds_packets_and_keeps_the_better_figures() -> None:
    one, again = sample(WAY), Sample(WAY, one_network := "10.87.0.0/24", is_reached=True)
    assert one.network == one_network
    lose(one)
    one.dscp["46"] = None
    again.rate_bps, again.is_own_limit, again.rtt_us = 120e6, True, [150.0, 900.0]
    again.sent, again.lost, again.bursts, again.dscp = 1000, 1, 1, {"46": 46, "34": 0}
    one.add(again)
    assert (one.rate_bps, one.is_own_limit, one.rtt_us) == (120e6, True, [150.0, 900.0])
    assert (one.sent, one.lost, one.bursts) == (3000, 41, 11)
    assert (one.dscp["46"], one.dscp["34"]) == (46, 34)
    assert one.mtu == 1500


def test_a_path_that_answers_the_second_time_is_reached() -> None:
    silent = Sample(WAY, "10.87.0.0/24")
    silent.add(sample(WAY))
    assert silent.is_reached
    assert silent.rate_bps == 100e6
