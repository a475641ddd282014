"""An attacker on the network of a running job: it sends every kind of packet that the job itself did not make.

`Plain` has an ordinary socket and knows what a program on the same network can guess. `Raw` has raw sockets too: it
records what passes by, and sends under any address.
"""

import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from scapy.layers.inet import IP, UDP
from scapy.sendrecv import sniff
from scapy.supersocket import L3RawSocket

from commlayer.tools import dissect
from commlayer.tools.dissect import DLCP, Address, Captured

Shot = tuple[str, bytes]
"""The counter of the receiver that must show it ("foreign", "forged" or "replayed"), and the datagram."""

OVERSIZED_BYTES = 60000


def made_up(source: int, destination: int, epoch: int, chance: random.Random) -> Iterator[Shot]:
    """Packets of an attacker that knows the format, the epoch and the ranks, but not the key."""
    layer: Any = DLCP
    right = {"source": source, "epoch": epoch, "path": 0}
    guess = bytes(16)
    for kind in dissect.KINDS:
        fields = {name: chance.randrange(8) for name in ("group", "sequence", "index", "number")}
        for payload in (b"", bytes(8)):
            packet = layer(kind=kind, **fields, **right, ack_now=1, last=1) / payload
            yield "forged", bytes(packet)
            yield "forged", bytes(dissect.seal(packet, guess, destination))
    abort = layer(kind="ABORT", group=1, offset=(1 << 32) - 6, number=5, **right)
    yield "forged", bytes(abort)
    yield "foreign", bytes(layer(kind="DATA", source=source, epoch=epoch ^ 1))
    yield "foreign", bytes(layer(kind="DATA", source=destination, epoch=epoch))
    yield "foreign", bytes(layer(kind="DATA", source=4000, epoch=epoch))
    yield "foreign", bytes(layer(kind="DATA", source=source, epoch=epoch, path=7))
    yield "foreign", bytes(layer(kind=len(dissect.KINDS), **right))
    yield "foreign", bytes(layer(kind="DATA", version=dissect.VERSION + 1, **right))
    yield "foreign", bytes(layer(kind="DATA", length=9, **right) / bytes(8))
    yield "foreign", bytes(layer(kind="DATA", **right))[: chance.randrange(1, dissect.HEAD_BYTES)]
    yield "foreign", bytes(layer(kind="DATA", **right) / bytes(OVERSIZED_BYTES))[:-1]
    yield "forged", bytes(layer(kind="DATA", **right) / bytes(OVERSIZED_BYTES))
    yield "foreign", chance.randbytes(chance.randrange(1, 1400))


def distorted(each: Captured, chance: random.Random, *, auth: str) -> Iterator[Shot]:
    """Distorted copies of a recorded packet, for its receiver."""
    data = bytes(each.packet)
    yield "replayed", data
    yield "foreign", data[:-1]
    yield "foreign", data + b"\0"
    yield "foreign", data + bytes(OVERSIZED_BYTES - len(data))
    yield "foreign", _changed(data, 30, 1)  # the epoch
    for at in (3, chance.randrange(8, 28), chance.randrange(dissect.TAG_AT, dissect.HEAD_BYTES)):
        yield "forged", _changed(data, at, 1 << chance.randrange(8))
    is_covered = dissect.KINDS[each.packet.kind] != "DATA" or auth == "full"
    if is_covered and len(data) > dissect.HEAD_BYTES:
        yield "forged", _changed(data, chance.randrange(dissect.HEAD_BYTES, len(data)), 1)


def _changed(data: bytes, at: int, mask: int) -> bytes:
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


class Plain:
    """An ordinary socket."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def attack(self, addresses: list[Address], epoch: int, duration_s: float) -> None:
        """Sends made-up packets to every rank, for that long. A reply to any of them is an error."""
        chance = random.Random(1)
        self._socket.setblocking(False)
        until = time.monotonic() + duration_s
        while time.monotonic() < until:
            for rank, address in enumerate(addresses):
                for counter, data in made_up((rank + 1) % len(addresses), rank, epoch, chance):
                    self._socket.sendto(data, address)
                    self.sent[counter] += 1
                time.sleep(0.002)
        time.sleep(0.2)
        try:
            reply = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        raise AssertionError(f"the attacker got an answer: {reply!r}")


ENOUGH = 20
"""Replayed packets."""


class Raw:
    """Raw sockets: needs root."""

    def __init__(self, interface: str, auth: str) -> None:
        self.sent: Counter[str] = Counter()
        self._auth = auth
        self._interface = interface
        self._socket: Any = L3RawSocket(iface=interface)

    def attack(self, addresses: list[Address], epoch: int, duration_s: float) -> None:
        """Records the packets of the ranks, and sends distorted copies from the senders' addresses; for this long, and
        until it has replayed `ENOUGH`."""
        chance = random.Random(2)
        ranks = set(addresses)
        until = time.monotonic() + duration_s
        while time.monotonic() < until or self.sent["replayed"] <= ENOUGH:
            for packet in chance.sample(recorded := self._record(ranks), min(20, len(recorded))):
                for counter, data in distorted(packet, chance, auth=self._auth):
                    self._send(packet.sender, packet.receiver, data, counter)
                (other,) = ranks - {packet.sender, packet.receiver}
                self._send(packet.sender, other, bytes(packet.packet), "forged")  # meant for another rank
                self._send(packet.receiver, packet.sender, bytes(packet.packet), "foreign")  # a mirror
            for rank, address in enumerate(addresses):
                sender = addresses[(rank + 1) % len(addresses)]
                for counter, data in made_up((rank + 1) % len(addresses), rank, epoch, chance):
                    self._send(sender, address, data, counter)

    def _record(self, ranks: set[Address]) -> list[Captured]:
        def ours(frame: Any) -> bool:
            return UDP in frame and IP in frame and (frame[IP].dst, frame[UDP].dport) in ranks

        frames = sniff(iface=self._interface, lfilter=ours, count=60, timeout=1)
        return [packet for packet in dissect.captured(frames) if {packet.sender, packet.receiver} <= ranks]

    def _send(self, sender: Address, receiver: Address, data: bytes, counter: str) -> None:
        header: Any = IP(src=sender[0], dst=receiver[0])
        self._socket.send(header / UDP(sport=sender[1], dport=receiver[1]) / data)
        self.sent[counter] += 1
