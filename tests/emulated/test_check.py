import dataclasses
import itertools

import pytest

from commlayer.tools.emulate import check as checking
from commlayer.tools.emulate.check import check, losses
from commlayer.tools.emulate.event import Event
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario


def test_losses_are_the_gaps_of_the_numbers() -> None:
    assert losses([0, 1, 2], 3) == (0.0, [])
    assert losses([3, 1, 0, 1], 8) == (5 / 8, [1, 4])
    assert losses([], 4) == (1.0, [4])


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_BLAST_S", 0.5)
    monkeypatch.setattr(checking, "_LOSS_S", 1.0)


@pytest.mark.needs_root
def test_declared_is_measured() -> None:
    link = Link(rate_bps=20e6, loss=0.05, loss_burst_packets=4, delay_ms=5, priorities=True, not_ect_buffer_packets=32)
    with Network(Scenario(hosts=3, nics=(link,))) as network:
        figures = list(itertools.islice(check(network), 6))
    assert [figure.what.split()[1] for figure in figures] == ["0"] * 6
    assert not [figure for figure in figures if not figure.good]


@pytest.mark.needs_root
def test_switches_that_ignore_the_priority_are_found() -> None:
    with Network(Scenario(hosts=3, nics=(Link(rate_bps=20e6),))) as network:
        declared = Link(rate_bps=20e6, priorities=True, not_ect_buffer_packets=32)
        network.scenario = dataclasses.replace(network.scenario, nics=(declared,))
        bad = [figure.what for figure in itertools.islice(check(network), 5) if not figure.good]
    assert bad == [
        "host 0 NIC 0: priority: CS6 against CS0",
        "host 0 NIC 0: drop precedence: ECT against Not-ECT",
    ]


@pytest.mark.needs_root
def test_a_network_unlike_its_description_is_found() -> None:
    with Network(Scenario(hosts=2, nics=(Link(rate_bps=20e6),))) as network:
        # the network changes behind the back of the declaration
        network.apply(Event(0, "rate", host=0, rate_bps=10e6))
        network.apply(Event(0, "loss", host=0, loss=0.2))
        network.apply(Event(0, "loss", host=1, loss=0.1))
        bad = [figure.what for figure in check(network) if not figure.good]
    assert bad == ["host 0 NIC 0: UDP goodput", "host 0 NIC 0: loss", "host 1 NIC 0: UDP goodput", "host 1 NIC 0: loss"]
