"""CURVE: encrypted zmq sockets for programs that have the job's key.

Both key pairs come from the job's key, so a stranger knows not even the server's public key and cannot say a word that
the server would answer. The server also asks each client for the public key that the job's key gives (`Gate`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ConfigError

VIEW_MAX_BYTES = 256 << 20
"""Longest message to a client: a view of all ranks. Longer ones end their connection."""

HANDSHAKE_S = 5.0
"""Longest time from a connection to the proof that it has the key."""

ZAP = "inproc://zeromq.zap.01"
"""The address at which libzmq asks whether a client may connect (ZeroMQ RFC 27)."""


def load() -> Any:
    """The module zmq. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("zmq")
    except ImportError as error:
        raise ConfigError(
            f"commlayer top, COMMLAYER_TOP and commlayer.publish need pyzmq ({error}): pip install pyzmq"
        ) from error


def pair(key: bytes, who: str) -> tuple[bytes, bytes]:
    """The public and the secret CURVE key of `who`, `server` or `client`, from the job's key, in Z85."""
    secret = hashlib.blake2s(who.encode(), key=key, digest_size=32, person=b"dlcp-top").digest()
    text: bytes = importlib.import_module("zmq.utils.z85").encode(secret)
    return load().curve_public(text), text


def _made(context: Any, kind: int, key: bytes, who: str, most_bytes: int) -> Any:
    made = context.socket(kind)
    made.ipv6 = True
    made.linger = 0
    made.maxmsgsize = most_bytes
    made.handshake_ivl = int(HANDSHAKE_S * 1e3)
    made.curve_publickey, made.curve_secretkey = pair(key, who)
    return made


def server(context: Any, key: bytes, most_bytes: int) -> Any:
    """A ROUTER that accepts clients with the job's key, once a `Gate` is open, and messages of up to `most_bytes`."""
    made = _made(context, load().ROUTER, key, "server", most_bytes)
    made.curve_server = True
    made.zap_domain = b"commlayer"
    return made


def client(context: Any, key: bytes, most_bytes: int = VIEW_MAX_BYTES) -> Any:
    """A DEALER for the server of the same key, which accepts messages of up to `most_bytes`."""
    made = _made(context, load().DEALER, key, "client", most_bytes)
    made.curve_serverkey = pair(key, "server")[0]
    return made


def monitor(connected: Any, more: int = 0) -> Any:
    """A socket that tells how the handshakes of a client go, and of `more` events."""
    zmq = load()
    failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    return connected.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | failed | zmq.EVENT_HANDSHAKE_FAILED_AUTH | more)


def events(news: Any) -> Iterator[dict[str, Any]]:
    """What a socket that monitors another one has to tell now."""
    while news.events & load().POLLIN:  # many times faster than poll(0)
        yield importlib.import_module("zmq.utils.monitor").parse_monitor_message(news.recv_multipart())


class Gate:
    """Lets clients in whose public key the job's key gives: answers libzmq's questions in this context."""

    def __init__(self, context: Any, key: bytes) -> None:
        zmq = load()
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP)
        self._allowed = importlib.import_module("zmq.utils.z85").decode(pair(key, "client")[0])

    def answer(self) -> None:
        """Answers the next question."""
        version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        is_allowed = mechanism == b"CURVE" and credentials == [self._allowed]
        verdict = [b"200", b"OK"] if is_allowed else [b"400", b"not a client of this job"]
        self.socket.send_multipart([version, number, *verdict, b"", b""])


class Door:
    """The port of a server, with room for a number of connections. It ends those that come when there is no room, so
    that silent ones of strangers cannot use up the descriptors of this process."""

    def __init__(
        self, router: Any, endpoint: str, room: int, tune: Callable[[socket.socket], None] = lambda _: None
    ) -> None:
        """Port 0 of the endpoint: any that is free. `tune`: called with each connection that is let in. Raises
        zmq.ZMQError if the port is taken."""
        zmq = load()
        self.router = router
        self._room, self._tune = room, tune
        self._inside: set[int] = set()
        """Descriptors of libzmq."""
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """A descriptor to refuse connections with, also when the process can open no other one."""
        self.news = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        """Readable when a connection has begun or ended."""
        try:
            router.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self.port = int(router.last_endpoint.rpartition(b":")[2])

    def look(self) -> list[int]:
        """Counts the connections, and ends those for which there is no room. The descriptors of those that ended."""
        zmq = load()
        ended: list[int] = []
        for found in events(self.news):
            if found["event"] == zmq.EVENT_DISCONNECTED:
                self._inside.discard(found["value"])
                ended.append(found["value"])
            elif len(self._inside) < self._room:
                self._inside.add(found["value"])
                self._change(found["value"], self._tune)
            else:
                self._refuse(found["value"])
        return ended

    def has(self, descriptor: int) -> bool:
        """Whether this is a connection for which there is room."""
        return descriptor in self._inside

    @property
    def count(self) -> int:
        """The number of connections."""
        return len(self._inside)

    def _refuse(self, descriptor: int) -> None:
        self._change(descriptor, lambda same: same.shutdown(socket.SHUT_RDWR))

    def _change(self, descriptor: int, change: Callable[[socket.socket], None]) -> None:
        """Changes a connection, unless libzmq has closed it: then another thread may have the descriptor by now."""
        with contextlib.suppress(OSError):
            same = socket.socket(fileno=os.dup2(descriptor, self._spare, inheritable=False))
            try:
                if same.family in (socket.AF_INET, socket.AF_INET6) and same.getsockname()[1] == self.port:
                    change(same)
            finally:
                same.detach()

    def close(self) -> None:
        """Ends all connections."""
        self.router.disable_monitor()
        self.router.close()
        os.close(self._spare)


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ConfigError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{address!r}: use HOST:PORT")
    if not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{address!r}: use HOST:PORT with a port from 1 to {(1 << 16) - 1}")
    return host.strip("[]"), int(port)


def endpoint(address: str, *, bind: bool = False, is_one_host: bool = False) -> str:
    """zmq's endpoint of `host:port`; with `bind`, one of this host.

    Raises ConfigError for an address that is none. A name of this host that stands for loopback in its own files
    (127.0.1.1, as Debian has it) binds to all interfaces, because other hosts know another address; if the job has
    `is_one_host`, to loopback.
    """
    host, port = split(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{address}: {error.strerror}; name a host that this one knows, or its address") from error
    text = str(found[0][4][0])
    is_number = False
    with contextlib.suppress(ValueError):
        is_number = bool(ipaddress.ip_address(host))
    if bind and not is_one_host and not is_number and host != "localhost" and ipaddress.ip_address(text).is_loopback:
        return f"tcp://*:{port}"
    return f"tcp://[{text}]:{port}" if ":" in text else f"tcp://{text}:{port}"
