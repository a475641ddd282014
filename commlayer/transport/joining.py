"""Joining a group: makes peers, shared memory and a native group from the ranks' descriptions.

Every call into the engine releases the GIL.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CommError, ConfigError
from .description import check_description
from .diagnosis import Diagnosis
from .group import STAGING_BYTES, NativeGroup
from .incarnation import MOST, Incarnations, agreed
from .interfaces import described
from .log import log
from .members import Members
from .native import Engine
from .paths import common_interface, pair_paths
from .reach import Reach
from .status import check, ffi, lib

SPIN_US = 60
"""Longest spin before a blocked wait sleeps; 0 if the host has fewer cores than ranks."""


def group_hosts(descriptions: Sequence[dict[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """Group ranks by host. A rank with shared memory turned off is a host of its own."""
    hosts: dict[str, list[int]] = {}
    for rank, description in enumerate(descriptions):
        hosts.setdefault(description["host"] if description["shm"] else f"rank {rank}", []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def join(
    engine: Engine,
    members: Members,
    descriptions: Sequence[dict[str, Any]],
    exchange: Callable[[str, bytes], list[bytes]],
    *,
    job: int,
    key: bytes,
    group: int,
    paired: bool = False,
) -> NativeGroup:
    """Opens this rank's end of a group, from the descriptions of all ranks' engines; every rank calls it.

    `exchange(key, value)` all-gathers through the Store. `job`, its `key` (16 bytes, secret) and `group` are the
    same on every rank. `paired`: an earlier run of the job may have had the same key, so each pair of processes derives
    a key of its own.

    Raises ConfigError if no network path leads to a rank, UnreachableError if no packet arrives, and CommError if this
    process still has a group with a rank's earlier run, or a description is none.
    """
    rank, what = members.rank, members.who
    for other, description in enumerate(descriptions):
        check_description(description, members, other)
    epoch = job & 0xFFFF  # separates packets of the job's earlier runs from forged packets
    status = lib.cl_engine_identify(engine.raw, job, key, descriptions[rank]["peer"], epoch)
    if status == lib.CL_EINVAL:
        raise CommError(
            f"{what}: this process still has a group of another job, or of this job's former WORLD: destroy or abort "
            f"all its groups, then make a new WORLD"
        )
    check(status, f"{what}: joining job {job:x}")
    engine.key = key
    hosts = group_hosts(descriptions)
    local = next(ranks for ranks in hosts if rank in ranks)
    fd, problem = _share_memory(local, members, descriptions, exchange)
    try:
        report = {"problem": problem, "incarnations": engine.incarnations()}
        reports = [json.loads(text) for text in exchange("mapped", json.dumps(report).encode())]
        problems = [told["problem"] for told in reports]
        if any(problems):
            # All ranks see the same answers, so all of them fall back.
            log.warning("%s: no shared memory (%s): using the network instead", what, next(filter(None, problems)))
            lib.cl_host_close_fd(fd)
            hosts, local, fd = tuple((alone,) for alone in range(len(descriptions))), (rank,), -1
        incarnations = [told["incarnations"] for told in reports]
        unreachable = _add_peers(engine, members, local, descriptions, incarnations, key if paired else None)
        opened = _open(engine, what, group, rank, local, descriptions, fd)
    finally:
        lib.cl_host_close_fd(fd)
    try:
        reach = Reach(engine, members, hosts, descriptions)
        # No rank sends or posts before all ranks have opened the group.
        if any(exchange("open", b"" if reach.is_known() else b"try")):
            reach.check(exchange)
    except BaseException:
        lib.cl_group_close(opened)
        raise
    packets = [description["packet_bytes"] for description in descriptions]  # all ranks make the same plans from them
    return NativeGroup(
        Diagnosis(engine, members.group, rank, descriptions),
        hosts,
        opened,
        common_interface(descriptions, rank),
        frozenset(unreachable),
        packet_bytes=min(packets),
        largest_packet_bytes=sorted(packets)[-2:][0],  # two ranks use the smaller size of theirs
        peers=[description["peer"] for description in descriptions],
    )


def join_both(
    engine: Engine,
    members: Members,
    descriptions: Sequence[dict[str, Any]],
    exchange: Callable[[str, bytes], list[bytes]],
    *,
    job: int,
    key: bytes,
    group: int,
    paired: bool,
) -> NativeGroup:
    """As `join`; the group also has an end on the second engine (`NativeGroup.second`), if there is one, and if each of
    several hosts has one rank."""
    joined = join(engine, members, descriptions, exchange, job=job, key=key, group=group, paired=paired)
    second = engine.second
    if second is None or not 1 < joined.size == len(joined.hosts):
        return joined
    described = [description.get("second", {}) for description in descriptions]

    def exchange_second(step: str, value: bytes) -> list[bytes]:
        return exchange(f"{step} (second engine)", value)

    second.use()
    try:
        # Paired: with one key for all, packets of the ranks' first engines would be valid for the second ones.
        beside = join(second, members, described, exchange_second, job=job, key=key, group=group, paired=True)
    except BaseException:
        second.release()
        engine.use()  # closing the group ends this use; the caller ends that of the group which it did not get
        joined.close()
        raise
    joined.pair(beside)
    return joined


def _share_memory(
    local: Sequence[int],
    members: Members,
    descriptions: Sequence[dict[str, Any]],
    exchange: Callable[[str, bytes], list[bytes]],
) -> tuple[int, str]:
    """A descriptor of the memory that this host's ranks share (-1: none needed), and a problem, or ""."""
    rank = members.rank
    fd = ffi.new("int32_t *", -1)
    problem = ""
    if len(local) > 1 and rank == local[0]:
        status = lib.cl_host_create(len(local), STAGING_BYTES, fd)
        problem = "" if status == 0 else f"{members.name(rank)} cannot create shared memory"
    try:
        offers: list[int] = [json.loads(text) for text in exchange("memory", json.dumps(fd[0]).encode())]
    except BaseException:
        lib.cl_host_close_fd(fd[0])
        raise
    if len(local) > 1 and rank != local[0]:
        owner = local[0]
        status = -1 if offers[owner] < 0 else lib.cl_host_open(descriptions[owner]["pid"], offers[owner], fd)
        problem = "" if status == 0 else f"{members.name(rank)} cannot open the memory of {members.name(owner)}"
    return fd[0], problem


def _add_peers(
    engine: Engine,
    members: Members,
    local: Sequence[int],
    descriptions: Sequence[dict[str, Any]],
    incarnations: Sequence[Incarnations],
    key: bytes | None,
) -> set[int]:
    """Adds the other ranks as peers; returns the ranks of this host that no network path leads to."""
    rank, unreachable = members.rank, set()
    for other in range(len(descriptions)):
        if other == rank:
            continue
        if pair_paths(descriptions[rank], descriptions[other]) or other not in local:
            grants = engine.config.credit_bytes > 0 and other not in local
            _add_peer(engine, members, other, descriptions[rank], descriptions[other], key, grants=grants)
            peers = descriptions[rank]["peer"], descriptions[other]["peer"]
            incarnation = agreed(incarnations[rank], peers[0], incarnations[other], peers[1])
            if incarnation > MOST:
                raise CommError(f"{members.who}: {members.name(other)} was lost {MOST} times; restart the job")
            if incarnation:
                engine.revive(peers[1], incarnation, f"{members.who}: meeting {members.name(other)} again")
        else:
            unreachable.add(other)  # no network at all: plans within the host still work
        if other in local:
            _watch(engine, members, other, descriptions[other])
    return unreachable


def _open(
    engine: Engine,
    what: str,
    group: int,
    rank: int,
    local: Sequence[int],
    descriptions: Sequence[dict[str, Any]],
    fd: int,
) -> Any:
    """Opens the native group."""
    bells = b"".join(descriptions[member]["bell"].encode().ljust(32, b"\0") for member in local)
    peers = [description["peer"] for description in descriptions]
    keep = (ffi.new("uint16_t[]", peers), ffi.new("uint32_t[]", local), ffi.from_buffer(bells))
    options = {
        "id": group,
        "rank": rank,
        "size": len(descriptions),
        "peers": keep[0],
        "local": keep[1],
        "local_count": len(local),
        "host_fd": fd,
        "staging_bytes": STAGING_BYTES,
        "spin_us": SPIN_US if len(local) <= len(os.sched_getaffinity(0)) else 0,
        "bells": ffi.cast("const char *", keep[2]),
    }
    out = ffi.new("cl_group **")
    check(
        lib.cl_group_open(engine.raw, ffi.new("struct cl_group_options *", options), out), f"{what}: opening the group"
    )
    return out[0]


def _watch(engine: Engine, members: Members, other: int, peer: dict[str, Any]) -> None:
    status = lib.cl_engine_watch_process(engine.raw, peer["peer"], peer["pid"])
    if status != 0:
        log.warning(
            "%s: cannot watch %s, process %d; its death will show as a timeout",
            members.who,
            members.name(other),
            peer["pid"],
        )
    elif peer["meter"] >= 0 and lib.cl_engine_read_meter(engine.raw, peer["peer"], peer["meter"]) != 0:
        log.warning(
            "%s: cannot read the meter of %s, process %d; its share of this host's interfaces shows by its queue alone",
            members.who,
            members.name(other),
            peer["pid"],
        )


def pair_key(key: bytes, own: dict[str, Any], peer: dict[str, Any]) -> bytes:
    """The key of two processes in these lives, the same on both: a keyed hash (BLAKE2s, RFC 7693) of the lives."""
    lives = sorted((end["peer"], end["life"]) for end in (own, peer))
    return hashlib.blake2s(json.dumps(lives).encode(), key=key, digest_size=len(key), person=b"dlcppair").digest()


def _add_peer(
    engine: Engine,
    members: Members,
    other: int,
    own: dict[str, Any],
    peer: dict[str, Any],
    key: bytes | None,
    *,
    grants: bool = False,
) -> None:
    paths = pair_paths(own, peer)
    who, name = members.who, members.name(other)
    if not paths:
        raise ConfigError(
            f"{who}: no network path leads to {name}: this host has {described(own)}, that one "
            f"{described(peer)}; name interfaces that reach each other with COMMLAYER_IFNAME on every rank"
        )
    if not engine.meet(peer["peer"], peer["life"]):
        raise CommError(
            f"{who}: {name} has left the job and come again, and this process still has a group with its former life; "
            f"destroy that group, too"
        )
    texts = [ffi.new("char[]", path.address.encode()) for path in paths]
    addresses = ffi.new("char *[]", texts)
    local = ffi.new("uint32_t[]", [path.local for path in paths])
    ports = ffi.new("uint32_t[]", [path.port for path in paths])
    options = {
        "peer": peer["peer"],
        "path_count": len(paths),
        "local": local,
        "remote_addresses": ffi.cast("const char *const *", addresses),
        "remote_ports": ports,
        "packet_bytes": min(own["packet_bytes"], peer["packet_bytes"]),
        "key": ffi.NULL if key is None else ffi.from_buffer("uint8_t[]", pair_key(key, own, peer)),
        "grants": grants,
    }
    status = lib.cl_engine_add_peer(engine.raw, ffi.new("struct cl_peer_options *", options))
    check(status, f"{who}: adding {name} at {described(peer)}")
    engine.routes.note(peer["peer"], paths)
