"""`Agent`: the thread of each rank that takes a sample per second and sends it to rank 0.

`arm` starts it, and at rank 0 the collector, if COMMLAYER_TOP asks for them; nothing else of this package runs or is
loaded otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from multiprocessing.util import Finalize
from typing import Any

from ..config import Config
from ..errors import ConfigError
from ..transport.fork import disowned_in_children
from ..transport.log import log
from . import curve
from .collector import ANSWER, APPLIED, CHANGE, DROP, END, SAMPLE, Collector
from .control import Change, check, mailbox
from .meter import meter
from .sample import Sampler

PERIOD_S = 1.0

LOOK_S = 0.25
"""How often it looks whether the process ends."""

QUEUED = 4
"""Samples that wait for a connection; later ones are dropped."""

FAREWELL_MS = 300
"""Longest time for the last message of a process that ends."""

_guard = threading.Lock()
_running: Agent | None = None


class Agent:
    """Takes samples of one process, and sends them. `key`: of the job. `world`: the number of its ranks."""

    def __init__(self, address: str, key: bytes, rank: int, world: int) -> None:
        self.job = (address, key, rank)
        """What another agent of this process would have in common with this one."""
        self._address, self._key, self._rank = address, key, rank
        is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
        self._collector = Collector(address, key, world, is_one_host=is_one_host) if rank == 0 else None
        self._sampler = Sampler(rank, world)
        self._reports: deque[tuple[int, int]] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-top", daemon=True)
        disowned_in_children(self)

    def start(self) -> None:
        """Begins."""
        meter.turn_on()
        if self._collector is not None:
            self._collector.start()
        self._thread.start()

    def disown(self) -> None:
        """See `fork.Owned`. pyzmq leaves the sockets of another process alone."""
        global _guard, _running
        _guard, _running = threading.Lock(), None
        meter.turn_off()

    def stop(self) -> None:
        """Tells rank 0 that this rank has left, and ends the threads."""
        meter.turn_off()
        self._stop.set()
        self._thread.join(2.0)
        if self._collector is not None:
            self._collector.stop()

    def _run(self) -> None:
        zmq = curve.load()
        context = zmq.Context()
        link = curve.client(context, self._key)
        link.sndhwm = QUEUED
        link.immediate = True  # a queue would outlive a server that never comes
        try:
            link.connect(curve.endpoint(self._address))
        except ConfigError as error:
            log.warning("COMMLAYER_TOP: rank %d sends no samples: %s", self._rank, error)
            context.destroy(linger=0)
            return
        rank = str(self._rank).encode()
        mailbox.on_applied = lambda number, step: self._reports.append((number, step))
        due_s = time.monotonic() + PERIOD_S
        while not self._stop.is_set():
            left_s = due_s - time.monotonic()
            if link.poll(1e3 * min(max(left_s, 0.0), LOOK_S)):
                with contextlib.suppress(ValueError):  # the sample is of another version
                    self._hear(link, rank, link.recv_multipart())
            while self._reports:
                number, step = self._reports.popleft()
                self._send(link, [APPLIED, rank, str(number).encode(), str(step).encode()])
            if left_s <= 0:
                due_s = max(due_s + PERIOD_S, time.monotonic() + PERIOD_S / 2)
                self._send(link, [SAMPLE, rank, json.dumps(self._sampler.take()).encode()])
        self._send(link, [END, rank])
        link.close(linger=FAREWELL_MS)
        context.term()

    def _hear(self, link: Any, rank: bytes, message: list[bytes]) -> None:
        """A change that is offered, or dropped."""
        kind, text = message[0], message[-1]
        if kind == DROP:
            mailbox.drop(int(text))
        elif kind == CHANGE:
            change = Change.read(text)
            refusal = check(change)
            if not refusal:
                mailbox.offer(change)
            self._send(link, [ANSWER, rank, str(change.number).encode(), refusal.encode()])

    def _send(self, link: Any, message: list[bytes]) -> None:
        """Sends a message, or drops it if nobody takes it."""
        zmq = curve.load()
        with contextlib.suppress(zmq.Again):
            link.send_multipart(message, flags=zmq.NOBLOCK)


def arm(config: Config, engine: Any, rank: int, world: int) -> None:
    """Starts the agent of this process, for settings that ask for one. A job that was made anew gets another agent.

    Raises ConfigError if pyzmq is missing, or the address is none.
    """
    global _running
    if engine.is_private:
        return
    curve.load()
    address = config.top_address()
    with _guard:
        if _running is not None:
            if _running.job == (address, engine.key, rank):
                return
            _running.stop()
        else:
            Finalize(None, disarm, exitpriority=2)  # processes that multiprocessing made do not run atexit
        _running = Agent(address, engine.key, rank, world)
        _running.start()


def disarm() -> None:
    """Ends the agent of this process."""
    global _running
    with _guard:
        if _running is not None:
            _running.stop()
            _running = None
