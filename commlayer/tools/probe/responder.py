"""The passive end of a measurement: answers pings, and counts the packets of trains."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence

from . import cpu
from .packets import DATA, END, PING, PONG_BODY, RESULT, Address, Arrival, Port, wait_for
from .train import Train, summarize

_IDLE_S = 0.03
_BATCH = 64  # packets of one socket before the others have their turn
_KEPT_MAX = 64


class Responder:
    """Serves one driver at a time on all ports of this host.

    It lives as long as the ports: the next driver may begin before this host knows that the last one has ended.
    """

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports = list(ports)
        self._trains: dict[tuple[Address, int], Train] = {}
        self._dropped = dict.fromkeys(range(len(self._ports)), 0)

    def serve(self, is_finished: Callable[[], bool], seconds: float) -> bool:
        """Answers until `is_finished`, which is asked whenever no packet has come for a while, for so long at most.
        Returns whether it was finished."""
        end = time.monotonic() + seconds
        while True:
            ready = wait_for(self._ports, _IDLE_S)
            if not ready and is_finished():
                return True
            if time.monotonic() >= end:
                return False
            for port in ready:
                for _ in range(_BATCH):
                    arrival = port.receive()
                    if arrival is None:
                        break
                    self._handle(port, arrival)

    def _handle(self, port: Port, arrival: Arrival) -> None:
        index = self._ports.index(port)
        key = arrival.sender, arrival.run
        if arrival.kind == DATA:
            train = self._trains.get(key) or self._begin(index, key)
            train.add(arrival.number, arrival.sent_ns, arrival.arrived_ns, arrival.dropped, arrival.size)
            self._dropped[index] = arrival.dropped
        elif arrival.kind == PING:
            port.pong(arrival, time.time_ns())
        elif arrival.kind == END:
            port.send(RESULT, arrival.sender, run=arrival.run, body=self._result(index, key, arrival))

    def _begin(self, index: int, key: tuple[Address, int]) -> Train:
        while len(self._trains) >= _KEPT_MAX:
            del self._trains[next(iter(self._trains))]
        train = self._trains[key] = Train(dropped_before=self._dropped[index], began=cpu.read())
        return train

    def _result(self, index: int, key: tuple[Address, int], end: Arrival) -> bytes:
        """The summary of a train so far: packets that come after the first END count for the answer to the next."""
        train = self._trains.get(key) or self._begin(index, key)
        train.dropped_after = self._dropped[index] = end.dropped
        wait = train.began.wait_until(cpu.read()) if train.began else 0.0
        return json.dumps(dataclasses.asdict(dataclasses.replace(summarize(train, end.number), cpu_wait=wait))).encode()


def read_pong(pong: Arrival) -> tuple[int, int, int]:
    """TOS byte and size of the ping as they arrived, and the ns until it was answered."""
    tos, size, held_ns = PONG_BODY.unpack_from(pong.body)
    return tos, size, held_ns
