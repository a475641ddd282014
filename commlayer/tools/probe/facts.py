"""Facts of a host that bear on its network: interfaces, CPU, and the kernel's limits."""

from __future__ import annotations

import array
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...transport.sockets import buffer_advice
from .packets import grow_buffers

_SIOCETHTOOL = 0x8946
_GDRVINFO = 0x03
_DRVINFO_BYTES = 196
_IFREQ = struct.Struct("16sP16x")
_OFFLOADS = {"tso": 0x1E, "gso": 0x23, "gro": 0x2B}  # ETHTOOL_GTSO, _GGSO, _GGRO
_FAST_BPS = 900e6
"""The rate from which on the kernel's default buffers are too small (docs/deploy.md)."""
_SLOW_GOVERNORS = ("powersave", "conservative", "ondemand")


def host_facts(names: Sequence[str]) -> dict[str, Any]:
    """The facts of this host and of its interfaces with these names. A fact that cannot be had is None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        receive, send = grow_buffers(sock)
        nics = {name: _nic(name, sock) for name in dict.fromkeys(names)}
    return {
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "receive_buffer_bytes": receive,
        "send_buffer_bytes": send,
        "rmem_max": _number("/proc/sys/net/core/rmem_max"),
        "wmem_max": _number("/proc/sys/net/core/wmem_max"),
        "netdev_max_backlog": _number("/proc/sys/net/core/netdev_max_backlog"),
        "nics": nics,
    }


def _nic(name: str, sock: socket.socket) -> dict[str, Any]:
    folder = f"/sys/class/net/{name}"
    speed = _number(f"{folder}/speed")
    return {
        "driver": _driver(name, sock),
        "speed_mbit_s": speed if speed is not None and speed > 0 else None,
        "mtu": _number(f"{folder}/mtu"),
        "receive_queues": len(list(Path(folder, "queues").glob("rx-*"))) or None,
        "send_queues": len(list(Path(folder, "queues").glob("tx-*"))) or None,
        "offloads": {offload: _offload(name, sock, command) for offload, command in _OFFLOADS.items()},
    }


def _driver(name: str, sock: socket.socket) -> str | None:
    buffer = array.array("B", struct.pack("I", _GDRVINFO).ljust(_DRVINFO_BYTES, b"\0"))
    if not _ethtool(name, sock, buffer):
        return None
    return buffer.tobytes()[4:36].split(b"\0")[0].decode(errors="replace") or None


def _offload(name: str, sock: socket.socket, command: int) -> bool | None:
    buffer = array.array("B", struct.pack("II", command, 0))
    return bool(struct.unpack("II", buffer.tobytes())[1]) if _ethtool(name, sock, buffer) else None


def _ethtool(name: str, sock: socket.socket, buffer: array.array[int]) -> bool:
    request = _IFREQ.pack(name.encode()[:15], buffer.buffer_info()[0])
    try:
        fcntl.ioctl(sock, _SIOCETHTOOL, request)
    except OSError:
        return False
    return True


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip() or None
    except OSError:
        return None


def _number(path: str) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def notes(facts: Mapping[str, Mapping[str, Any]], rates_bps: Mapping[str, float]) -> list[str]:
    """Advice from the facts of the hosts by name, and the best rate that each has reached."""
    return [*_buffer_notes(facts, rates_bps), *_cpu_notes(facts), *_unlike_notes(facts)]


def _buffer_notes(facts: Mapping[str, Mapping[str, Any]], rates_bps: Mapping[str, float]) -> list[str]:
    by_advice: dict[str, list[str]] = {}
    for host, fact in facts.items():
        text = buffer_advice(fact["receive_buffer_bytes"], fact["send_buffer_bytes"])
        if text and rates_bps.get(host, 0.0) >= _FAST_BPS:
            by_advice.setdefault(text, []).append(host)
    return [f"{joined(hosts)}: {text}" for text, hosts in by_advice.items()]


def _cpu_notes(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    slow = [host for host, fact in facts.items() if fact["governor"] in _SLOW_GOVERNORS]
    if not slow:
        return []
    governor = facts[slow[0]]["governor"]
    waking = f"the CPU governor {governor} lets the engine thread wake up slowly"
    return [f"{joined(slow)}: {waking}: cpupower frequency-set -g performance"]


def _unlike_notes(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Interfaces that differ from those of the same name on most hosts."""
    found = []
    names = dict.fromkeys(name for fact in facts.values() for name in fact["nics"])
    for name in names:
        for what, unit in (("speed_mbit_s", " Mbit/s"), ("mtu", " bytes MTU"), ("driver", " as its driver")):
            values = {host: fact["nics"][name][what] for host, fact in facts.items() if name in fact["nics"]}
            usual = max(values.values(), key=list(values.values()).count)
            unlike: dict[Any, list[str]] = {}
            for host, value in values.items():
                if value != usual and value is not None and usual is not None:
                    unlike.setdefault(value, []).append(host)
            found += [
                f"{joined(hosts)}: {name} has {value}{unit}, the others {usual}" for value, hosts in unlike.items()
            ]
    return found


def joined(names: Sequence[str], most: int = 4) -> str:
    """Names as a list in a sentence."""
    shown = list(names[:most]) + [f"{len(names) - most} more"] * (len(names) > most)
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
