"""The account of a train: the receiver's summary, for which the sender asks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from .packets import END, RESULT, Address, Port, wait_for
from .train import Summary

PATIENCE_S = 1.5
SPACE_S = 0.025
"""Seconds between tries: longer than a burst of losses."""


def accounts(ports: Sequence[Port], to: Address, run: int, sent: Sequence[int], rtt_s: float) -> list[Summary | None]:
    """The accounts of the trains of this run, of which each port has `sent` one; None where no answer came.

    Losses count once two answers agree: packets may still be on their way, on a busy machine for long.
    """
    last: list[Summary | None] = [None] * len(ports)
    open_ports = set(range(len(ports)))
    for _ in range(round(2 * PATIENCE_S / SPACE_S)):
        time.sleep(SPACE_S)
        for index in open_ports:
            ports[index].send(END, to, run=run, number=sent[index])
        for index, summary in _answers(ports, open_ports, run, SPACE_S + 1.5 * rtt_s).items():
            before = last[index]
            last[index] = summary
            if summary.lost == 0 or (before is not None and before.received == summary.received):
                open_ports.discard(index)
        if not open_ports:
            break
    return last


def _answers(ports: Sequence[Port], asked: set[int], run: int, seconds: float) -> dict[int, Summary]:
    """The first answer of each port that asked."""
    found: dict[int, Summary] = {}
    end = time.monotonic() + seconds
    while left := asked - found.keys():
        ready = wait_for([ports[index] for index in left], end - time.monotonic())
        if not ready:
            break
        for index in [index for index in left if ports[index] in ready]:
            arrival = ports[index].receive()
            if arrival is not None and arrival.kind == RESULT and arrival.run == run:
                found[index] = Summary(**json.loads(arrival.body))
    return found
