"""The stress on a network while a command runs: traffic from hosts outside the job, and faults by the timetable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .event import Event
from .namespace import EmulationError
from .network import Network
from .traffic import Traffic


class Stress:
    """`with Stress(network, note):` runs the scenario's traffic and timetable. `note` gets a line for each event."""

    def __init__(self, network: Network, note: Callable[[str], None] = lambda _line: None) -> None:
        self._network, self._note = network, note
        self._traffic: list[Traffic] = []
        self._stop = threading.Event()
        self._timetable = threading.Thread(target=self._follow, name="timetable", daemon=True)
        self._error: str | None = None

    def __enter__(self) -> Stress:
        scenario = self._network.scenario
        try:
            for flow in scenario.flows:
                target = scenario.link(flow.to, flow.nic)
                sources = [
                    self._network.add_source(flow.nic, flow.source_link(target)) for _sender in range(flow.senders)
                ]
                name, address = self._network.name(flow.to), self._network.address(flow.to, flow.nic)
                self._traffic.append(Traffic(flow, sources, name, address, target.payload_bytes))
            if scenario.events:
                self._timetable.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def error(self) -> str | None:
        """Why the stress differs from the scenario, so that the run is worthless; None if it does not."""
        flows = [str(traffic.error) for traffic in self._traffic if traffic.error is not None]
        return self._error or (f"traffic stopped: {flows[0]}" if flows else None)

    def close(self) -> None:
        """Stops traffic and timetable; idempotent."""
        self._stop.set()
        if self._timetable.ident is not None:
            self._timetable.join()
        for traffic in self._traffic:
            traffic.close()
        self._traffic.clear()

    def _follow(self) -> None:
        start_s = time.monotonic()
        for event in sorted(self._network.scenario.events, key=_time):
            if self._stop.wait(max(0.0, start_s + event.at_s - time.monotonic())):
                return
            try:
                self._network.apply(event)
                self._note(f"{time.monotonic() - start_s:.2f} s: {event}")
            except EmulationError as error:
                self._error = f"{event}: {error}"
                return
            except Exception as error:  # nobody would hear of an error on this thread
                self._error = f"{event}: {error!r}"
                return


def _time(event: Event) -> float:
    return event.at_s
