import contextlib
import itertools
import threading
from collections.abc import Iterator

import pytest

from commlayer.tools.probe.flow import Flow, FlowMeasurement
from commlayer.tools.probe.links import lossy
from commlayer.tools.probe.packets import DATA, PING, Arrival, Port
from commlayer.tools.probe.responder import Responder
from tests.unit.probe.loopback import COOKIE, Filter, Filtered, keep


@contextlib.contextmanager
def measurement(filtered: Filter = keep, *, address: str = "127.0.0.1", count: int = 4) -> Iterator[FlowMeasurement]:
    """Flows towards a responder that serves until the end."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(contextlib.closing(Port(address, COOKIE, share=count))) for _ in range(count)]
        far = stack.enter_context(contextlib.closing(Filtered(address, COOKIE)))
        ended = threading.Event()
        thread = threading.Thread(target=Responder([far]).serve, args=(ended.is_set, 60.0))
        flows = FlowMeasurement(ports, (far.address, far.number), 0.0)
        far.filter_arrival = filtered
        thread.start()
        try:
            yield flows
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize(("address", "single_bps"), [("127.0.0.1", 1e8), ("::1", 1e10)])
def test_all_flows_of_a_good_path(address: str, single_bps: float) -> None:
    with measurement(address=address) as flows:
        flows.measure_routes()
        flows.measure_rtt()
        total_bps = flows.measure_rate(1, 0.05, 400, 1000, single_bps)
        flows.measure_loss(2, 200, 500, 4000.0)
    assert len({flow.port for flow in flows.flows}) == 4
    assert all(flow.route == [] for flow in flows.flows)  # no router between
    assert all(flow.rtt_us > 0 for flow in flows.flows)
    assert total_bps == sum(flow.rate_bps for flow in flows.flows) > 1e6
    assert [(flow.sent, flow.lost, flow.bursts) for flow in flows.flows] == [(50, 0, 0)] * 4


def test_losses_count_for_the_flow_that_has_them() -> None:
    bad: list[int] = []

    def lose(arrival: Arrival) -> Arrival | None:
        return None if arrival.kind == DATA and arrival.sender[1] in bad and arrival.number in (3, 4, 20) else arrival

    with measurement(lose) as flows:
        bad.append(flows.ports[2].number)
        flows.measure_loss(7, 120, 500, 4000.0)
    assert [(flow.lost, flow.bursts) for flow in flows.flows] == [(0, 0), (0, 0), (3, 2), (0, 0)]


def test_a_flow_without_answers_has_no_round_trip() -> None:
    silent: list[int] = []
    with measurement(lambda packet: None if packet.kind == PING and packet.sender[1] in silent else packet) as flows:
        silent.append(flows.ports[0].number)
        flows.measure_rtt()
    assert [flow.rtt_us > 0 for flow in flows.flows] == [False, True, True, True]


def test_flows_of_a_second_pass_are_added() -> None:
    flow = Flow(4000, 300.0, 100, 2, 1, 5e6, ["10.0.0.1"])
    flow.add(Flow(4000, 250.0, 200, 1, 1, 4e6))
    assert flow == Flow(4000, 250.0, 300, 3, 2, 5e6, ["10.0.0.1"])


@pytest.mark.parametrize("period", [2, 4, 8])
def test_a_loss_at_even_times_meets_all_ports(period: int) -> None:
    """With the ports in the same order in each round, it would meet some of them, as a bad link does."""
    counts = itertools.count()

    def lose(arrival: Arrival) -> Arrival | None:
        return None if arrival.kind == DATA and next(counts) % period == 0 else arrival

    with measurement(lose) as flows:
        flows.measure_loss(3, 400, 100, 4000.0)
    assert sum(flow.lost for flow in flows.flows) == 400 // period
    assert lossy(flows.flows) == []
