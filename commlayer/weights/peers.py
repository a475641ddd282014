"""`Peers`: a reader's connections to other readers, which give it parts. They belong to the thread of its `Intake`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ..telemetry import curve
from .message import ANSWER_MAX_BYTES, WANT, Want, tuned

REACH_S = 3.0
"""Longest time to reach another reader."""

BATCH = 16
"""Messages that are taken from one connection before the next one."""


class Peer:
    """A connection to another reader."""

    def __init__(self, context: Any, key: bytes, address: str) -> None:
        zmq = curve.load()
        self.socket = tuned(curve.client(context, key, ANSWER_MAX_BYTES))
        self.socket.rcvhwm = BATCH
        self.news = curve.monitor(self.socket, zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self.socket.connect(f"tcp://{address}")
        self._since_s = time.monotonic()
        self._is_linked = False

    def failure(self) -> str:
        """What has ended the connection; empty: nothing."""
        zmq = curve.load()
        for found in curve.events(self.news):
            if found["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return "its connection ended" if self._is_linked else "it was not reached"
            self._is_linked = True
        if not self._is_linked and time.monotonic() - self._since_s > REACH_S:
            return "it was not reached"
        return ""

    def close(self) -> None:
        """Ends the connection."""
        self.socket.disable_monitor()
        self.socket.close(linger=0)


class Peers:
    """Connections by address: made when a part is wanted, kept while plans name the reader."""

    def __init__(self, context: Any, key: bytes, poller: Any) -> None:
        """`poller`: waits for them, too."""
        self._context, self._key, self._poller = context, key, poller
        self._peers: dict[str, Peer] = {}

    def want(self, address: str, want: Want) -> None:
        """Asks for the parts of a seat. One that takes no questions any more is late, and so replaced."""
        zmq = curve.load()
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(self._context, self._key, address)
            for socket in (peer.socket, peer.news):
                self._poller.register(socket, zmq.POLLIN)
        with contextlib.suppress(zmq.Again):
            peer.socket.send_multipart([WANT, want.text()], flags=zmq.NOBLOCK)

    def hear(self) -> Iterator[tuple[str, list[Any]]]:
        """The next messages, and the addresses from which they come."""
        zmq = curve.load()
        for address, peer in list(self._peers.items()):
            for _ in range(BATCH):
                if self._peers.get(address) is not peer or not peer.socket.events & zmq.POLLIN:
                    break
                try:
                    frames = peer.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                yield address, frames

    def failures(self) -> dict[str, str]:
        """The readers whose connections have ended, and why. They are forgotten."""
        found = {address: reason for address, peer in self._peers.items() if (reason := peer.failure())}
        for address in found:
            self.drop(address)
        return found

    def keep(self, addresses: Iterable[str]) -> None:
        """Ends the connections to all others."""
        for address in set(self._peers) - set(addresses):
            self.drop(address)

    def drop(self, address: str) -> None:
        """Ends a connection."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            for socket in (peer.socket, peer.news):
                self._poller.unregister(socket)
            peer.close()
