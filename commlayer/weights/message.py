"""The messages between a publisher and its readers, and of readers to each other; the key of their sockets.

A reader asks, and says what it holds; the publisher answers once it has another version: with the difference, or with
the whole state. So at most one answer is on its way to a reader, and a slow one gets a later version, no queue. An
answer comes in parts (`answer.py`), of which other readers may send some (`parts.py`, `swarm.py`).
Messages come from programs with the same secret, which may be of another release, or broken: they are checked. The
publisher says HEARD to each question at once, so that both sides learn of another release in seconds. What all releases
share: a message has three frames (a question two), the second is a JSON object with `protocol` and, from protocol 4 on,
`release`, and a message of another protocol is an error at its receiver.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import ipaddress
import json
from typing import Any, TypeVar

from ..config import Config
from ..errors import ConfigError
from ..telemetry import curve
from ..transport.secret import read_secret
from .parts import PUBLISHER

PROTOCOL = 5
"""The version of the messages; a release that changes them raises it."""

RELEASE = importlib.metadata.version("commlayer")

ASK, LACK, TOOK, DONE, HOLD = b"ask", b"lack", b"took", b"done", b"hold"
"""Kinds of messages, the first frame of each. Of a reader to the publisher: a `Head`, its question; a `Want`, a seat
whose source has failed; a `Want`: so many parts of its own seat have passed through it; a `Head`: all parts of a shared
answer have come; a `Head`: it holds a version, and can give it."""

HEARD, WHOLE, DIFFERENCE, TEXT, PART, LAST, END = b"heard", b"whole", b"difference", b"text", b"part", b"last", b"end"
"""Kinds of the publisher's messages. HEARD has a `Head`: it knows the question. WHOLE and DIFFERENCE have a `Head` and
a `Plan`. The text of the layout follows in TEXT, if the reader lacks it, and the tags of the parts of a whole state, if
readers give them; then come parts of the content, and at some time LAST: how many parts each seat has. The second frame
of these three is their place, the third the bytes."""

WANT, GONE = b"want", b"gone"
"""Kinds between readers: a question, answered with PART, and the answer of one that has the content no more; both have
a `Want`."""

ASK_MAX_BYTES = 64 << 10

ANSWER_MAX_BYTES = 1 << 20
"""Longest frame that a reader accepts; libzmq applies it before it knows who sends."""

WINDOW = 4
"""Messages in the queue of a connection on which parts leave."""
VERSIONS = 1 << 63

HEARTBEAT_MS = 1000
SILENT_MS = 4000
"""A connection without a heartbeat for so long has ended."""

LEAST_CLASS = 1 << 2
"""The IP header's class of service: LE (RFC 8622), below all other traffic in switches that know it, and like unmarked
packets in others."""


class OtherReleaseError(ValueError):
    """A message of another protocol. Its text says which."""


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
    """The version to which this is a difference; -1: it is none."""
    layout_bytes: int = 0
    """The length of the layout's text in an answer; 0: the reader has it."""
    tags_bytes: int = 0
    """The length of the tags in an answer."""
    address: str = ""
    """The address at which the asking reader serves others; empty: nowhere."""
    protocol: int = PROTOCOL
    release: str = RELEASE
    """The release of commlayer."""

    def text(self) -> bytes:
        """The message as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def read(cls, text: bytes) -> Head:
        """Raises ValueError for anything that is no head, and OtherReleaseError for one of another protocol."""
        return _read(cls, text)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the content of an answer comes to a reader."""

    name: str
    """The content's name, the same for all its readers; empty: too short to be shared."""
    sources: list[str]
    """The source of each seat: the address of a reader, or PUBLISHER."""
    deal: int = 0
    """Names a `Deal`: the publisher gives each part to the first seat that has room. 0: part `n` belongs to seat `n`
    modulo the number of seats."""

    def text(self) -> bytes:
        """The message as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def read(cls, text: bytes) -> Plan:
        """Raises ValueError for anything that is no plan."""
        found = _read(cls, text)
        if not found.sources:
            raise ValueError("a plan without sources")
        if found.deal and PUBLISHER not in found.sources:
            raise ValueError("a deal without a seat of the reader's own")
        return found

    @property
    def own(self) -> int:
        """The seat of a deal whose parts the publisher gives to this reader, which passes them on."""
        return self.sources.index(PUBLISHER)

    @property
    def is_shared(self) -> bool:
        """Whether other readers give parts."""
        return any(source != PUBLISHER for source in self.sources)


@dataclasses.dataclass(frozen=True)
class Want:
    """The missing parts of a seat."""

    request: int
    """The number of the reader's question to the publisher."""
    name: str
    """The content's name."""
    seat: int
    seats: int
    deal: int
    """That of the reader's plan."""
    at: int
    """How many parts of the seat the reader has."""
    why: str = ""
    """What the former source did; empty: it had the content no more."""

    def text(self) -> bytes:
        """The message as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def read(cls, text: bytes) -> Want:
        """Raises ValueError for anything that is no such message."""
        found = _read(cls, text)
        if not found.seat < found.seats:
            raise ValueError(f"seat {found.seat} of {found.seats}")
        return found


_Message = TypeVar("_Message", Head, Plan, Want)
_KINDS = {"int": int, "str": str, "list[str]": list}


def _read(cls: type[_Message], text: bytes) -> _Message:
    try:
        found = json.loads(text) if len(text) <= ASK_MAX_BYTES else None
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
    if isinstance(found, dict) and found.get("protocol", PROTOCOL) != PROTOCOL:
        raise OtherReleaseError(
            f"it has commlayer {found.get('release', 'of an earlier release')!s:.40} (messages of version "
            f"{found['protocol']!s:.40}), this process commlayer {RELEASE} (version {PROTOCOL}): install one release "
            f"of commlayer at the publisher and at its readers"
        )
    fields = {field.name: _KINDS[str(field.type)] for field in dataclasses.fields(cls)}
    if not isinstance(found, dict) or found.keys() != fields.keys():
        raise ValueError("not a message of this release of commlayer")
    for name, value in found.items():
        least = -1 if name == "base" else 0
        if type(value) is not fields[name] or (isinstance(value, int) and not least <= value < VERSIONS):
            raise ValueError(f"{name} is {value!r:.40}")
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
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
