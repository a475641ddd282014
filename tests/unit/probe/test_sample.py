import json

from commlayer.tools.probe.flow import Flow
from commlayer.tools.probe.sample import Crossed, Sample, Way
from tests.unit.probe.samples import lose, sample

WAY = Way(0, "eth0", 1, "eth0")


def test_a_sample_survives_json() -> None:
    one = sample(WAY)
    lose(one)
    one.flows, one.flows_rate_bps = [Flow(4000, 210.0, 250, 2, 1, 5e7, ["10.0.0.1"]), Flow(4001)], 9e7
    one.crossed = Crossed(5e7, False, [2000.0, 9000.0], 3000, 40)
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


def test_flows_are_added_by_their_ports_and_the_better_crossing_counts() -> None:
    one, again = sample(WAY), sample(WAY)
    one.flows = [Flow(4000, 300.0, 100, 2, 2)]
    again.flows = [Flow(4000, 200.0, 100, 1, 1), Flow(4001, 250.0, 100)]
    one.crossed = Crossed(5e7, False, [2000.0, 9000.0], 3000, 40)
    again.crossed = Crossed(9e7, False, [2000.0, 9000.0], 3000, 40)
    one.add(again)
    assert one.flows == [Flow(4000, 200.0, 200, 3, 3), Flow(4001, 250.0, 100)]
    assert one.crossed.rate_bps == 9e7
