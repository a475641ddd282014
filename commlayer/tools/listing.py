"""The packets of a capture as `commlayer dissect` prints them: lines of at most 80 columns of plain text, or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .dissect import KINDS, Address, Captured, Verifier

FLAGS = {"last": "l", "ack_now": "a", "droppable": "d", "safe": "s", "tail": "t"}
"""The letters of a packet's flags."""

LEGEND = (
    "time in ms since the first packet; kind; priority; group/operation/message and",
    "byte offset in the message; bytes; packet number on its path; flags: l last",
    "packet of its message, a acknowledge at once, d droppable, s protected packets",
    "have arrived, t tail, mN marks seen; tag: ok, BAD, or ? (not checked)",
)

HEADING = (
    f"{'time':>9} {'way':<6} {'kind':<8} p {'message':<15} {'offset':>9} {'bytes':>5} {'number':>8} {'flags':<6} tag"
)

NAMES = ("source", "path", "number", "group", "sequence", "index", "offset", "length", "priority", "epoch", "signature")


def listing(found: Sequence[Captured], key: bytes | None, limit: int = 0) -> Iterator[str]:
    """The lines for the first `limit` packets; 0: for all."""
    ends = {address: _letters(i) for i, address in enumerate(_addresses(found))}
    ranks = {captured.sender: captured.packet.source for captured in found}
    yield f"{len(found)} packets"
    for address, name in ends.items():
        rank = f" (rank {ranks[address]})" if address in ranks else ""
        yield f"{name:>3} = {_text(address)}{rank}"
    yield from LEGEND
    yield HEADING
    tags = set()
    for captured, good in _verified(found, key, limit):
        tags.add(good)
        packet = captured.packet
        kind = KINDS.get(packet.kind, str(packet.kind))
        flags = "".join(letter for name, letter in FLAGS.items() if getattr(packet, name))
        if kind == "ACK" and packet.signature:
            flags += f"m{packet.signature}"  # packets marked by switches so far, modulo 4096
        way = f"{ends[captured.sender]}>{ends[captured.receiver]}"
        message = f"{packet.group}/{packet.sequence}/{packet.index}"
        tag = {True: "ok", False: "BAD", None: "?"}[good]
        time_ms = (captured.time_s - found[0].time_s) * 1e3
        yield (
            f"{time_ms:9.3f} {way:<6} {kind:<8} {packet.priority} {message:<15} {packet.offset:>9} {packet.length:>5} "
            f"{packet.number:>8} {flags:<6} {tag}"
        ).rstrip()
    if limit and len(found) > limit:
        yield f"... and {len(found) - limit} more"
    if tags == {False}:
        yield "no tag is right: is it the key of this job, and has the job a COMMLAYER_SECRET_FILE?"


def objects(found: Sequence[Captured], key: bytes | None, limit: int = 0) -> list[dict[str, Any]]:
    """The first `limit` packets as values for JSON; 0: all. `tag_ok` is null where the tag was not checked."""
    return [
        {
            "time_s": captured.time_s,
            "from": _text(captured.sender),
            "to": _text(captured.receiver),
            "kind": KINDS.get(captured.packet.kind, str(captured.packet.kind)),
            **{name: int(getattr(captured.packet, name)) for name in NAMES},
            "flags": [name for name in FLAGS if getattr(captured.packet, name)],
            "tag": f"{captured.packet.tag:016x}",
            "tag_ok": good,
        }
        for captured, good in _verified(found, key, limit)
    ]


def _verified(found: Sequence[Captured], key: bytes | None, limit: int) -> Iterator[tuple[Captured, bool | None]]:
    verifier = None if key is None else Verifier(key, found)
    for captured in found[: limit or None]:
        yield captured, verifier.verify(captured) if verifier else None


def _addresses(found: Sequence[Captured]) -> list[Address]:
    """Each address once, in the order in which they appear."""
    return list(dict.fromkeys(address for captured in found for address in (captured.sender, captured.receiver)))


def _text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _letters(number: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    text = chr(ord("A") + number % 26)
    return text if number < 26 else _letters(number // 26 - 1) + text
