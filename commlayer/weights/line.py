"""`Line`: a reader's connection to its publisher. It belongs to the thread of the reader's `Intake`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..telemetry import curve
from .message import ANSWER_MAX_BYTES, tuned
from .peers import BATCH

RECONNECT_MOST_MS = 2000


class Link(NamedTuple):
    """The state of the connection."""

    is_up: bool = False
    was_up: bool = False
    refusals: int = 0
    """Connections without a handshake, before the first one with it."""
    away_since_s: float = 0.0


class Line:
    """Connects anew whenever the connection has ended."""

    def __init__(self, context: Any, key: bytes, endpoint: str, poller: Any) -> None:
        """`poller`: waits for it, too."""
        zmq = curve.load()
        self._socket = tuned(curve.client(context, key, ANSWER_MAX_BYTES))
        self._socket.rcvhwm = 0
        # Not `immediate`: with that, libzmq drops what has come when a connection ends, as the last message of all.
        self._socket.reconnect_ivl_max = RECONNECT_MOST_MS
        self._news = curve.monitor(self._socket, zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED)
        self._socket.connect(endpoint)
        for watched in (self._socket, self._news):
            poller.register(watched, zmq.POLLIN)
        self.link = Link(away_since_s=time.monotonic())

    def look(self) -> bool:
        """Follows the connection. Whether a new one has begun."""
        zmq, is_new = curve.load(), False
        for found in curve.events(self._news):
            event, link = found["event"], self.link
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.link, is_new = Link(is_up=True, was_up=True), True
            elif event == zmq.EVENT_CONNECTED:
                self.link = link._replace(refusals=link.refusals + (not link.was_up))
            elif link.is_up:
                self.link = link._replace(is_up=False, away_since_s=time.monotonic())
        return is_new

    def absent(self) -> None:
        """Begins to measure anew how long the publisher is away."""
        self.link = self.link._replace(away_since_s=time.monotonic())

    def say(self, frames: list[Any]) -> bool:
        """Whether there was room for a message."""
        zmq = curve.load()
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def hear(self) -> Iterator[list[Any]]:
        """The next messages."""
        zmq = curve.load()
        for _ in range(BATCH):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return

    def close(self) -> None:
        """Follows the connection no more."""
        self._socket.disable_monitor()
