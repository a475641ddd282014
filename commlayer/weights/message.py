"""The messages between a publisher and its readers, and the key of their sockets.

A reader asks, and says what it holds; the publisher answers once it has another version: with the difference, or with
the whole state. So at most one answer is on its way to a reader, and a slow one gets a later version, no queue. An
answer comes in parts (`answer.py`).
Messages come from programs with the same secret, which may be of another release, or broken: they are checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import json
from typing import Any

from ..config import Config
from ..errors import ConfigError
from ..telemetry import curve
from ..transport.secret import read_secret

PROTOCOL = 2
ASK, WHOLE, DIFFERENCE, PART, END = b"ask", b"whole", b"difference", b"part", b"end"
"""Kinds of messages: the first frame of each. The second is a `Head` as JSON. WHOLE or DIFFERENCE is followed by the
parts of the answer: first those of the layout's text, if the reader lacks it, then those of the content. Their second
frame is their place, their third the bytes."""

ASK_MAX_BYTES = 64 << 10

PART_BYTES = 256 << 10
"""Longest part. Heartbeats wait for one of them: at less than PART_BYTES / SILENT_MS, 64 kB/s, a connection ends."""

ANSWER_MAX_BYTES = 1 << 20
"""Longest frame that a reader accepts; libzmq applies it before it knows who sends."""

WINDOW = 8
"""Messages in the publisher's queue of a connection."""
VERSIONS = 1 << 63

HEARTBEAT_MS = 1000
SILENT_MS = 4000
"""A connection without a heartbeat for so long has ended."""

LEAST_CLASS = 8 << 2
"""The IP header's class of service: CS1 (RFC 3662), below all other traffic in switches that know it."""


@dataclasses.dataclass(frozen=True)
class Head:
    """What a message says of a state."""

    request: int
    """The number of the question, which its answer repeats."""
    life: str = ""
    """Names the publisher's life, in which version numbers grow; empty in questions: nothing is held."""
    version: int = 0
    """The version of the message; in questions, the one that the reader holds."""
    digest: str = ""
    layout: str = ""
    """Fingerprint of the layout."""
    base: int = -1
    """The version to which this is a difference."""
    layout_bytes: int = 0
    """The length of the layout's text in an answer; 0: the reader has it."""
    code_bytes: int = 0
    """The length of the content in an answer."""
    protocol: int = PROTOCOL

    def text(self) -> bytes:
        """The message as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def read(cls, text: bytes) -> Head:
        """Raises ValueError for anything that is no head of this release."""
        try:
            found = json.loads(text) if len(text) <= ASK_MAX_BYTES else None
        except RecursionError as error:
            raise ValueError("JSON that is nested too deeply") from error
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if not isinstance(found, dict) or found.keys() != fields.keys():
            raise ValueError("not a message of this release of commlayer")
        if found["protocol"] != PROTOCOL:
            raise ValueError(f"protocol {found['protocol']!r:.40}, here {PROTOCOL}: use one release of commlayer")
        for name, value in found.items():
            kind = str if name in ("life", "digest", "layout") else int
            if type(value) is not kind or (isinstance(value, int) and not -1 <= value < VERSIONS):
                raise ValueError(f"{name} is {value!r:.40}")
        return cls(**found)


def key_and_endpoint(address: str, secret_file: str | None, *, bind: bool = False) -> tuple[bytes, str]:
    """The key of the sockets of a publisher at `host:port`, and zmq's name of the address.

    Raises ConfigError for an address that is none, for a secret that cannot be read, and for an address that other
    hosts can reach without a secret.
    """
    path = Config.from_environment().secret_file if secret_file is None else secret_file
    secret = read_secret(path)
    endpoint = curve.endpoint(address, bind=bind, is_one_host=not secret)
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not secret and (host == "*" or not ipaddress.ip_address(host).is_loopback):
        raise ConfigError(
            f"{address}: without a secret, any program of the network could read or replace the weights; name a file "
            f"with the same secret in secret_file= or COMMLAYER_SECRET_FILE at the publisher and at its readers "
            f"(`head -c 32 /dev/urandom > FILE`), or use a loopback address"
        )
    return hashlib.blake2s(secret, digest_size=32, person=b"dlcp-pub").digest(), endpoint


def tuned(socket: Any) -> Any:
    """A socket that notices a silent end, whose packets are in the least class."""
    zmq = curve.load()
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = SILENT_MS
    socket.setsockopt(zmq.TOS, LEAST_CLASS)
    return socket
