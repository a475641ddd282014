"""The wire format as a scapy layer, for captures and for packets made by tests. Training jobs never import it: it needs
scapy.

    packet = seal(DLCP(kind="DATA", source=1, group=7, last=True) / b"payload!", key, destination=0)
    for packet in split(udp_payload): ...

native/protocol/packet.h defines the format; a test compares the two.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from scapy.fields import (
    BitEnumField,
    BitField,
    LEIntField,
    LELongField,
    LEShortField,
    XLEShortField,
)
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet

MAGIC = 0x4C43
VERSION = 4
HEAD_BYTES = 40
TAG_AT = 32
KINDS = dict(
    enumerate("DATA ACK PING READY ABORT MISMATCH PROBE STOP FRAGMENT REQUEST GRANT".split())  # noqa: SIM905
)
AUTHS = {"header": 0, "full": 1}

DIRECT_BYTES = 64
"""SipHash alone covers payloads up to this length (`CL_PACKET_DIRECT_BYTES`), and NH's sums of longer ones."""

NH_BLOCK_BYTES = 1024

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1


class DLCP(Packet):
    """One packet: the 40-byte header and `length` bytes of payload."""

    name = "DLCP"
    fields_desc = [  # noqa: RUF012  # scapy wants a list
        XLEShortField("magic", MAGIC),
        BitField("version", VERSION, 4),
        BitEnumField("kind", 0, 4, KINDS),
        BitField("safe", 0, 1),
        BitField("tail", 0, 1),
        BitField("droppable", 0, 1),
        BitField("ack_now", 0, 1),
        BitField("last", 0, 1),
        BitField("priority", 0, 3),
        LEShortField("source", 0),
        LEShortField("length", None),
        LEIntField("group", 0),
        LEIntField("sequence", 0),
        LEIntField("index", 0),
        LEIntField("offset", 0),
        LEIntField("number", 0),
        BitField("signature", 0, 12, tot_size=-2),  # -2: a little-endian pair of bytes
        BitField("path", 0, 4, end_tot_size=-2),
        LEShortField("epoch", 0),
        LELongField("tag", 0),
    ]

    def post_build(self, head: bytes, payload: bytes) -> bytes:
        """Fills in the length, unless it is set."""
        if self.length is None:
            head = head[:6] + struct.pack("<H", len(payload)) + head[8:]
        return head + payload

    def extract_padding(self, rest: bytes) -> tuple[bytes, bytes]:
        """The payload of this packet, and the bytes that follow it."""
        return rest[: self.length], rest[self.length :]


def seal(packet: Any, key: bytes, destination: int, *, auth: str = "full", number_high: int = 0) -> Any:
    """Sets the packet's tag as `cl_packet_seal` does, and returns it. `number_high`: upper half of its number."""
    packet.tag = tag(bytes(packet), key, destination, auth=auth, number_high=number_high)
    return packet


def split(payload: bytes) -> Iterator[DLCP]:
    """The DLCP packets in a captured UDP payload: several before segmentation, none if it is foreign."""
    while len(payload) >= HEAD_BYTES:
        magic, version_kind, length = struct.unpack_from("<HBxxxH", payload)
        if magic != MAGIC or version_kind >> 4 != VERSION or length > len(payload) - HEAD_BYTES:
            return
        yield DLCP(payload[: HEAD_BYTES + length])
        payload = payload[HEAD_BYTES + length :]


def tag(packet: bytes, key: bytes, destination: int, *, auth: str = "full", number_high: int = 0) -> int:
    """The tag of a whole packet under the job's key of 16 bytes; see `cl_packet_seal` in native/protocol/packet.h."""
    implied = struct.pack("<IHH", number_high, destination, AUTHS[auth])
    is_data = packet[2] & 0x0F == 0
    rest = b"" if is_data and auth == "header" else packet[HEAD_BYTES:]
    if len(rest) > DIRECT_BYTES:
        rest = nh_sums(key, rest)
    return siphash(key, packet[:TAG_AT] + implied + rest)


def nh_sums(key: bytes, data: bytes) -> bytes:
    """The sums of all blocks of `data`, two for each; see native/kernels/nh.h."""
    keys = _nh_keys(key)
    sums = []
    for start in range(0, len(data), NH_BLOCK_BYTES):
        block = data[start : start + NH_BLOCK_BYTES]
        words = struct.unpack(f"<{(len(block) + 7) // 8 * 2}I", block + bytes(-len(block) % 8))
        for masks in keys:
            added = [word + mask & _U32 for word, mask in zip(words, masks, strict=False)]
            padding = [mask for at, mask in enumerate(masks) if len(words) <= at < (len(block) + 63) // 64 * 16]
            sums.append(_pairs(added) + _pairs(padding) & _U64)
    return struct.pack(f"<{len(sums)}Q", *sums)


def _pairs(words: Sequence[int]) -> int:
    return sum(words[i] * words[i + 1] for i in range(0, len(words), 2))


@functools.lru_cache(maxsize=16)
def _nh_keys(key: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two keys of NH, as `cl_packet_expand_key` draws them."""
    count = NH_BLOCK_BYTES // 4
    drawn = b"".join(struct.pack("<Q", siphash(key, b"l-nh-key" + struct.pack("<Q", i))) for i in range(count))
    words = struct.unpack(f"<{2 * count}I", drawn)
    return words[:count], words[count:]


def siphash(key: bytes, data: bytes) -> int:
    """SipHash-2-4 (Aumasson and Bernstein, 2012, section 2), 64 bits."""
    k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    v0, v1, v2, v3 = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573

    def rounds(count: int) -> None:
        nonlocal v0, v1, v2, v3
        for _ in range(count):
            v0, v2 = v0 + v1 & _U64, v2 + v3 & _U64
            v1, v3 = _rotate(v1, 13) ^ v0, _rotate(v3, 16) ^ v2
            v0 = _rotate(v0, 32)
            v2, v0 = v2 + v1 & _U64, v0 + v3 & _U64
            v1, v3 = _rotate(v1, 17) ^ v2, _rotate(v3, 21) ^ v0
            v2 = _rotate(v2, 32)

    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) & 0xFF])  # the last byte is the length
    for (word,) in struct.iter_unpack("<Q", padded):
        v3 ^= word
        rounds(2)
        v0 ^= word
    v2 ^= 0xFF
    rounds(4)
    return v0 ^ v1 ^ v2 ^ v3


def _rotate(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & _U64


Address = tuple[str, int]


class Captured(NamedTuple):
    """A packet of a capture, with its sender and receiver."""

    time_s: float
    sender: Address
    receiver: Address
    packet: DLCP


def captured(frames: Iterable[Any]) -> Iterator[Captured]:
    """The DLCP packets among captured frames, as scapy's `rdpcap` and `sniff` return them."""
    for frame in frames:
        if UDP not in frame:
            continue
        ip = frame[IP] if IP in frame else frame[IPv6]
        udp = frame[UDP]
        for packet in split(bytes(udp.payload)):
            yield Captured(float(frame.time), (ip.src, udp.sport), (ip.dst, udp.dport), packet)


class Verifier:
    """Checks tags in a capture. A packet does not name its receiver; the receiver's own packets do.

    Packet numbers must be below 2^32 at the start of the capture.
    """

    def __init__(self, key: bytes, packets: Iterable[Captured]) -> None:
        self._key = key
        self._peers: dict[Address, int] = {}
        self._numbers: dict[tuple[Address, Address, bool], int] = {}
        for packet in packets:
            self._peers.setdefault(packet.sender, packet.packet.source)

    def verify(self, captured: Captured) -> bool | None:
        """Whether the tag is right; None if the receiver is unknown. Call it in the order of the capture."""
        if captured.receiver not in self._peers:
            return None
        ack = KINDS.get(captured.packet.kind) == "ACK"
        stream = (captured.sender, captured.receiver, ack)
        low = captured.packet.group if ack else captured.packet.number
        last = self._numbers.get(stream, 0)
        number = max(low, last + ((low - last + (1 << 31)) % (1 << 32) - (1 << 31)))  # the nearest one to the last
        good = any(
            tag(bytes(captured.packet), self._key, self._peers[captured.receiver], auth=auth, number_high=number >> 32)
            == captured.packet.tag
            for auth in AUTHS
        )
        if good:
            self._numbers[stream] = number
        return good
