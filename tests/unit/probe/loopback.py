"""A driver and a responder of this process, on loopback."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from commlayer.tools.probe.packets import DATA, Arrival, Port
from commlayer.tools.probe.path import Effort, Measurement
from commlayer.tools.probe.responder import Responder
from commlayer.tools.probe.sample import Sample, Way

COOKIE = b"12345678"
QUICK = Effort(burst_s=0.02, burst_bytes=400_000, bursts=1, train_packets=300)

Filter = Callable[[Arrival], Arrival | None]


class Filtered(Port):
    """A port behind a bad network: `filter_arrival` drops and changes what arrives."""

    filter_arrival: Filter = staticmethod(lambda arrival: arrival)

    def receive(self) -> Arrival | None:
        """The next packet that the filter lets pass."""
        while (arrival := super().receive()) is not None:
            if (passed := self.filter_arrival(arrival)) is not None:
                return passed
        return None


def keep(arrival: Arrival) -> Arrival:
    """A good network."""
    return arrival


def lossy(numbers: set[int]) -> Filter:
    """Loses these packets of every train."""
    return lambda arrival: None if arrival.kind == DATA and arrival.number in numbers else arrival


@contextlib.contextmanager
def measurement(filtered: Filter = keep, *, address: str = "127.0.0.1", mtu: int = 1500) -> Iterator[Measurement]:
    """A measurement towards a responder that serves until the end."""
    near, far = Port(address, COOKIE), Filtered(address, COOKIE)
    far.filter_arrival = filtered
    ended = threading.Event()
    thread = threading.Thread(target=Responder([far]).serve, args=(ended.is_set, 60.0))
    thread.start()
    try:
        sample = Sample(Way(0, "lo", 1, "lo"), "127.0.0.0/8", interface_mtu=mtu)
        yield Measurement(near, (far.address, far.number), sample, QUICK, 0)
    finally:
        ended.set()
        thread.join()
        near.close()
        far.close()
