"""`Outlet`: a port at which readers ask, and from which parts leave. The publisher has one, and so has each reader
that serves.

It belongs to one thread. A connection is known by the identity that libzmq gives it.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import ConfigError
from ..telemetry import curve
from . import message

ROOM_MOST = 1024
"""Connections: readers, and strangers whose handshake has not failed yet."""

ROOM_SHARE = 4
"""They get at most one of so many descriptors: the others are the trainer's."""


UNSENT_MOST_BYTES = 64 << 10
"""That the kernel takes of a connection and has not sent yet. By default it would take Megabytes."""


class Leaving(Protocol):
    """Messages that leave on one connection."""

    @property
    def message(self) -> list[Any] | None:
        """What leaves next; None: nothing now. Another thread may change it between two looks."""

    def advance(self) -> None:
        """The message of the last look has left."""


class Outlet:
    """Connections of those who have the key."""

    def __init__(self, context: Any, key: bytes, endpoint: str, room: int = ROOM_MOST) -> None:
        """`room`: most connections. Raises ConfigError if the port is taken."""
        zmq = curve.load()
        self._gate = curve.Gate(context, key)
        router = message.tuned(curve.server(context, key, message.ASK_MAX_BYTES))
        router.router_mandatory = True  # or libzmq drops what has no room
        router.sndhwm = message.WINDOW
        try:
            self._door = curve.Door(router, endpoint, _room(room), _tune)
        except zmq.ZMQError as error:
            self._gate.socket.close()
            raise ConfigError(f"{endpoint}: {error.strerror}; use a free port, and an address of this host") from error
        self.sent_bytes = 0
        """The bytes of all messages; CURVE and TCP add about 1 % to them."""

    @property
    def port(self) -> int:
        """Its TCP port."""
        return self._door.port

    @property
    def count(self) -> int:
        """The number of connections."""
        return self._door.count

    @property
    def sockets(self) -> tuple[Any, Any, Any]:
        """What its thread must wait for."""
        return self._door.router, self._door.news, self._gate.socket

    def look(self, ready: Mapping[Any, int]) -> set[int]:
        """Lets clients in. The descriptors of connections that have ended."""
        if self._gate.socket in ready:
            self._gate.answer()
        return set(self._door.look())

    def has(self, descriptor: int) -> bool:
        """Whether this is a connection for which there is room."""
        return self._door.has(descriptor)

    def hear(self) -> tuple[bytes, int, bytes, bytes] | None:
        """The next message, if there is one: the identity and the descriptor of its connection, its kind and its text.

        Raises ValueError for one of another form.
        """
        zmq = curve.load()
        try:
            frames = self._door.router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        identity, kind, text = [frame.bytes for frame in frames]
        return identity, int(frames[-1].get("__fd")), kind, text

    def say(self, identity: bytes, frames: list[Any]) -> bool:
        """Whether there was room for a message. Raises ConnectionError if the connection has ended."""
        zmq = curve.load()
        try:
            self._door.router.send_multipart([identity, *frames], flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise ConnectionError("the connection has ended") from error
        self.sent_bytes += sum(len(frame) for frame in frames)
        return True

    def push(self, leaving: Mapping[bytes, Leaving]) -> tuple[bool, list[bytes]]:
        """Sends the next messages on each connection, in turns, while there is room. Whether any; the identities of
        those that have ended."""
        is_any, ended, turn = False, [], dict(leaving)
        for _ in range(message.WINDOW):
            for identity, its in list(turn.items()):
                try:
                    frames = its.message
                    if frames is not None and self.say(identity, frames):
                        its.advance()
                        is_any = True
                        continue
                except ConnectionError:
                    ended.append(identity)
                del turn[identity]
        return is_any, ended

    def close(self, linger_s: float = 0.0) -> None:
        """Ends all connections, after what was said has left, or after `linger_s`."""
        self._door.router.linger = int(linger_s * 1e3)
        self._door.close()
        self._gate.socket.close()


def _tune(connection: socket.socket) -> None:
    """Lets the kernel queue little: what waits here can still go to another connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_MOST_BYTES)


def _room(most: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // ROOM_SHARE))
