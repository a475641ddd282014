import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from commlayer.tools.emulate.event import Event
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.namespace import EmulationError
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from commlayer.tools.emulate.stress import Stress
from commlayer.tools.emulate.traffic import Cross, Incast, Protocol
from tests.world import until


def received_bytes(network: Network, host: int) -> int:
    return int(network.run(host, ["cat", "/sys/class/net/eth0/statistics/rx_bytes"]))


def carrier(network: Network, host: int, nic: int) -> str:
    return network.run(host, ["cat", f"/sys/class/net/eth{nic}/carrier"]).strip()


@pytest.mark.needs_root
@pytest.mark.parametrize("protocol", ["udp", "tcp"])
def test_cross_traffic_takes_its_share_of_one_link(protocol: Protocol) -> None:
    flow = Cross(to=1, share=0.5, protocol=protocol, senders=2)
    with Network(Scenario(hosts=2, nics=(Link(rate_bps=20e6),), cross=(flow,))) as network, Stress(network) as stress:
        time.sleep(0.5)
        for _ in range(20):  # on a busy machine the senders may be late
            before, start_s = received_bytes(network, 1), time.monotonic()
            time.sleep(1)
            rate_bps = (received_bytes(network, 1) - before) * 8 / (time.monotonic() - start_s)
            if 6e6 < rate_bps < 12e6:  # the other half stays free
                break
        assert received_bytes(network, 0) < received_bytes(network, 1) / 10
        assert stress.error is None
    assert 6e6 < rate_bps < 12e6


@pytest.mark.needs_root
@pytest.mark.parametrize("protocol", ["udp", "tcp"])
def test_incast_comes_in_bursts_of_every_sender(protocol: Protocol) -> None:
    flow = Incast(to=0, senders=4, burst_bytes=20_000, period_ms=250, protocol=protocol)
    with Network(Scenario(hosts=1, nics=(Link(rate_bps=100e6),), incast=(flow,))) as network, Stress(network) as stress:
        start_s, before = time.monotonic(), received_bytes(network, 0)
        until(lambda: received_bytes(network, 0) >= before + 6 * 80_000)
        elapsed_s = time.monotonic() - start_s
        assert stress.error is None
    assert elapsed_s > 0.7  # five whole periods lie between six bursts; the first may have been before


def controls_of(stress: Stress) -> set[bytes]:
    """The congestion controls of the senders: each flow opens its sink first, and then their sockets."""
    senders = [opened for traffic in stress._traffic for opened in traffic._open[1 : 1 + traffic._flow.senders]]
    return {sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") for sender in senders}


@pytest.mark.needs_root
@pytest.mark.parametrize("given", [{}, {"congestion_control": "reno"}], ids=["cubic", "reno"])
def test_the_machine_does_not_choose_the_congestion_control(given: dict[str, str]) -> None:
    wanted = given.get("congestion_control", "cubic")
    flow = Cross(to=0, share=0.5, protocol="tcp", **given)  # type: ignore[arg-type]
    with Network(Scenario(hosts=1, nics=(Link(rate_bps=20e6),), cross=(flow,))) as network, Stress(network) as stress:
        assert controls_of(stress) == {wanted.encode()}


@pytest.mark.needs_root
def test_a_congestion_control_that_the_kernel_lacks_is_named() -> None:
    flow = Cross(to=0, share=0.5, protocol="tcp", congestion_control="none")
    refusal = pytest.raises(EmulationError, match="congestion control 'none': the kernel refuses it")
    threads = threading.active_count()
    with Network(Scenario(hosts=1, nics=(Link(rate_bps=20e6),), cross=(flow,))) as network, refusal, Stress(network):
        pass
    assert threading.active_count() == threads


@pytest.mark.needs_root
def test_the_timetable_is_followed() -> None:
    events = (
        Event(0.3, "link_up", host=1, nic=1),
        Event(0.0, "link_down", host=1, nic=1),
        Event(0.1, "rate", host=0, rate_bps=5e6),
        Event(0.2, "loss", host=0, loss=0.5, nic=0),
        Event(60, "link_down", host=0),
    )
    scenario = Scenario(hosts=2, nics=(Link(rate_bps=10e6),) * 2, events=events)
    notes: list[str] = []
    carriers: list[str] = []

    def note(text: str) -> None:
        carriers.append(carrier(network, 1, 1))
        notes.append(text)

    with Network(scenario) as network, Stress(network, note) as stress:
        until(lambda: len(notes) == 4)
        assert carriers == ["0", "0", "0", "1"]
        assert carrier(network, 1, 1) == carrier(network, 1, 0) == "1"
        for nic in range(2):
            assert "rate 5Mbit" in network.run(0, ["tc", "class", "show", "dev", f"eth{nic}"])
        assert "rate 10Mbit" in network.run(1, ["tc", "class", "show", "dev", "eth0"])
        rules = network.run(0, ["nft", "list", "ruleset"])
        assert 'iifname "eth0"' in rules
        assert 'iifname "eth1"' not in rules
        assert stress.error is None
    assert [note.split(": ")[1].split()[0] for note in notes] == ["link_down", "rate", "loss", "link_up"]


@pytest.mark.needs_root
def test_an_event_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(hosts=1, events=(Event(0, "link_down", host=0),))
    with Network(scenario) as network:
        monkeypatch.setattr(Network, "switch", "nowhere")
        with Stress(network) as stress:
            until(lambda: stress.error is not None)
            assert "link_down at host 0" in str(stress.error)
        monkeypatch.undo()


class Broken:
    """A network whose links cannot be changed."""

    scenario = Scenario(events=(Event(0, "link_down", host=0),))

    def apply(self, event: Event) -> None:
        raise ZeroDivisionError(event.host)


def test_an_event_that_fails_in_any_way_is_an_error() -> None:
    broken: Any = Broken()
    with Stress(broken) as stress:
        until(lambda: stress.error is not None)
        assert stress.error == "link_down at host 0, all NICs: ZeroDivisionError(0)"


@pytest.mark.needs_root
def test_a_second_network_is_not_touched() -> None:
    with Network(Scenario(hosts=2)) as one, Network(Scenario(hosts=2)) as other:
        one.apply(Event(0, "link_down", host=0))
        assert carrier(one, 0, 0) == "0"
        assert carrier(other, 0, 0) == "1"
        assert one.name(0) != other.name(0)
        assert Path("/run/netns", one.name(0)).exists()
