"""Propagation delay: by netem if the kernel has it, otherwise by netfilter queues that this process empties in time.

A netfilter queue keeps the packets in the kernel; this process gets their numbers, and one verdict releases all packets
up to a number. That takes a core about 5 us per packet and adds about 0.1 ms of delay. netem has neither cost.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import struct
import threading
import time
from pathlib import Path

from .link import Link
from .namespace import EmulationError, call, inside

_CALL_IPTABLES = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")  # of the network namespace of this thread
_QUEUE_PACKETS = 1 << 20
_NETLINK_NETFILTER, _SOL_NETLINK, _NETLINK_NO_ENOBUFS = 12, 270, 5  # linux/netlink.h
_SO_RCVBUFFORCE = 33
# linux/netfilter/nfnetlink_queue.h
_SUBSYSTEM = 3 << 8
_PACKET, _CONFIG, _VERDICT_BATCH = _SUBSYSTEM | 0, _SUBSYSTEM | 2, _SUBSYSTEM | 3
_CFG_CMD, _CFG_PARAMS, _CFG_MAXLEN, _CFG_MASK, _CFG_FLAGS = 1, 2, 3, 4, 5
_BIND, _COPY_META, _FLAG_GSO = 1, 1, 4
_PACKET_HDR, _VERDICT_HDR, _ACCEPT = 1, 2, 1
_REQUEST, _ACKNOWLEDGE = 1, 4
_HEADER = struct.Struct("=IHHIIBBH")  # nlmsghdr, then nfgenmsg with the queue's number (big-endian)


def has_netem(namespace: str) -> bool:
    """Whether this kernel has netem."""
    try:
        call(f"tc -n {namespace} qdisc replace dev lo root netem delay 1us")
    except EmulationError:
        return False
    call(f"tc -n {namespace} qdisc delete dev lo root")
    return True


def add_netem(namespace: str, nic: int, interface: str, link: Link) -> None:
    """Delays packets that arrive at the interface. netem delays leaving ones, hence the device."""
    device = f"ifb{nic}"
    call(f"ip -n {namespace} link add {device} type ifb")
    call(f"ip -n {namespace} link set {device} up")
    everything = "protocol all u32 match u32 0 0"
    commands = [
        f"qdisc add dev {device} root netem delay {link.delay_ms}ms limit {_QUEUE_PACKETS}",
        f"qdisc add dev {interface} ingress",
        f"filter add dev {interface} parent ffff: {everything} action mirred egress redirect dev {device}",
    ]
    call(f"tc -n {namespace} -batch -", "\n".join(commands) + "\n")


class Delay:
    """Holds the packets to any number of addresses, on one thread, until `close`."""

    def __init__(self) -> None:
        self._queues: dict[socket.socket, tuple[int, float, collections.deque[tuple[float, int]]]] = {}
        self._thread: threading.Thread | None = None
        self._stop, self._stopped = socket.socketpair()

    def add(self, switch: str, address: str, delay_ms: float) -> None:
        """Delays packets to this address on their way through the bridges of the namespace `switch`: not in the host,
        whose kernel has stamped them by then with their time of arrival. Raises EmulationError if the kernel cannot."""
        number = len(self._queues)
        if not _CALL_IPTABLES.exists():
            with contextlib.suppress(OSError, EmulationError):
                call("modprobe br_netfilter")
        try:
            with inside(switch):
                _CALL_IPTABLES.write_text("1")
                queue = _bind(number)
            call(f"ip netns exec {switch} iptables -A FORWARD -d {address} -j NFQUEUE --queue-num {number}")
        except (OSError, EmulationError) as error:
            raise EmulationError(
                f"delay_ms = {delay_ms:g}: this kernel has neither netem nor netfilter queues for bridges ({error}); "
                "load sch_netem, or br_netfilter, nfnetlink_queue and xt_NFQUEUE, or leave the delay out"
            ) from error
        self._queues[queue] = (number, delay_ms / 1e3, collections.deque())

    def start(self) -> None:
        """Starts the thread, after all hosts have been added."""
        if self._queues:
            self._thread = threading.Thread(target=self._run, name="delay", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stops the thread; later packets are lost."""
        self._stop.close()
        if self._thread is not None:
            self._thread.join()
        for queue in self._queues:
            queue.close()
        self._queues.clear()
        self._stopped.close()

    def _run(self) -> None:
        while True:
            heads = [held[0][0] for _, _, held in self._queues.values() if held]
            wait_s = max(0.0, min(heads) - time.monotonic()) if heads else None
            ready, _, _ = select.select([self._stopped, *self._queues], [], [], wait_s)
            if self._stopped in ready:
                return
            for queue in ready:
                self._collect(queue)
            now_s = time.monotonic()
            for queue, (number, _, held) in self._queues.items():
                last = None
                while held and held[0][0] <= now_s:
                    last = held.popleft()[1]
                if last is not None:
                    verdict = _attribute(_VERDICT_HDR, struct.pack(">II", _ACCEPT, last))
                    queue.send(_message(_VERDICT_BATCH, number, verdict, _REQUEST))

    def _collect(self, queue: socket.socket) -> None:
        _, delay_s, held = self._queues[queue]
        with contextlib.suppress(BlockingIOError):
            while True:
                data = queue.recv(65536, socket.MSG_DONTWAIT)
                due_s = time.monotonic() + delay_s
                at = 0
                while at + 28 <= len(data):
                    length, kind = struct.unpack_from("=IH", data, at)
                    # the first attribute is the packet's header, which has its number
                    if kind == _PACKET:
                        held.append((due_s, struct.unpack_from(">I", data, at + 24)[0]))
                    at += (length + 3) & ~3


def _bind(number: int) -> socket.socket:
    queue = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    try:
        queue.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        queue.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
        queue.bind((0, 0))
        settings = (
            _attribute(_CFG_CMD, struct.pack(">BBH", _BIND, 0, socket.AF_INET)),
            _attribute(_CFG_PARAMS, struct.pack(">IB", 0, _COPY_META))
            + _attribute(_CFG_MAXLEN, struct.pack(">I", _QUEUE_PACKETS))
            + _attribute(_CFG_MASK, struct.pack(">I", _FLAG_GSO))
            + _attribute(_CFG_FLAGS, struct.pack(">I", _FLAG_GSO)),
        )
        for attributes in settings:
            queue.send(_message(_CONFIG, number, attributes, _REQUEST | _ACKNOWLEDGE))
            error = -struct.unpack_from("=i", queue.recv(4096), 16)[0]
            if error:
                raise OSError(error, "netfilter queue")
    except OSError:
        queue.close()
        raise
    return queue


def _attribute(kind: int, payload: bytes) -> bytes:
    length = 4 + len(payload)
    return struct.pack("=HH", length, kind) + payload + bytes(-length % 4)


def _message(kind: int, number: int, attributes: bytes, flags: int) -> bytes:
    return _HEADER.pack(_HEADER.size + len(attributes), kind, flags, 0, 0, 0, 0, socket.htons(number)) + attributes
