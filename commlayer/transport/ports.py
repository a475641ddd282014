"""`Ports`: the sockets of an engine, each with its interface, its address and its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import interfaces
from .interfaces import Interface
from .log import log
from .status import check, ffi, lib

LOOPBACK_MTU_BYTES = 9000


class Ports:
    """The sockets of an engine: `sockets` of them for each interface but loopback. The engine knows them by their place
    in `entries`. `raw`: the cl_engine pointer."""

    def __init__(self, used: Sequence[Interface], sockets: int) -> None:
        self.entries = interfaces.spread(used, sockets)
        """The interface of each socket. Once the socket is open, the entry also has its number (`port`) and its name
        (`endpoint`)."""

    def datagram_bytes(self, most: int) -> int:
        """The size of all datagrams. `most`: the largest MTU to use; 0: that of the interfaces."""
        sizes: list[int] = []
        for port in self.entries:
            mtu = min(port["mtu"], LOOPBACK_MTU_BYTES) if port["loopback"] else port["mtu"]
            sizes.append(min(mtu, most or mtu) - interfaces.IP_UDP_HEADER_BYTES[port["version"]])
        # One size for all paths: any packet may take any of them. Loopback counts only if there is nothing else.
        outside = [size for size, port in zip(sizes, self.entries, strict=True) if not port["loopback"]]
        return min(outside or sizes or [1472])

    def read(self, raw: Any) -> None:
        """Notes the numbers and the names of the sockets, which are known once the engine is open."""
        for index in range(len(self.entries)):
            self._read(raw, index)

    def follow(self, raw: Any, found: Sequence[Interface]) -> None:
        """Opens sockets again whose interface came back with another address: the former one reaches nobody. `found`:
        the interfaces of this host, as they are now."""
        present = {port["address"] for port in found}
        for index, port in enumerate(self.entries):
            moved = interfaces.moved(port, found)
            if port["address"] in present or moved is None:
                continue
            address = ffi.new("char[]", moved["address"].encode())
            status = lib.cl_engine_move_port(raw, index, address)
            if status != lib.CL_OK:
                reason = ffi.string(lib.cl_error_text(status)).decode()
                log.warning("%s left %s for %s: %s", port["ifname"], port["address"], moved["address"], reason)
                continue
            log.warning("%s left %s for %s; new groups use it", port["ifname"], port["address"], moved["address"])
            port |= {name: moved[name] for name in ("address", "prefix", "running")}
            self._read(raw, index)

    def _read(self, raw: Any, index: int) -> None:
        port, number = self.entries[index], ffi.new("uint32_t *")
        check(lib.cl_engine_port(raw, index, number), f"asking for the port of {port['address']}")
        port["port"] = number[0]
        text = ffi.new("char[]", lib.CL_ADDRESS_BYTES)
        check(lib.cl_engine_address(raw, index, text), f"asking for the endpoint of {port['address']}")
        port["endpoint"] = ffi.string(text).decode()

    def names(self) -> list[str]:
        """The interfaces of the sockets, by place; sockets of one interface have numbers of their own."""
        names = [str(port["ifname"]) for port in self.entries]
        twins = [name for name in set(names) if names.count(name) > 1]
        return [f"{name}#{names[:i].count(name)}" if name in twins else name for i, name in enumerate(names)]

    def address(self, port: int) -> str:
        """The local address of a path, by its number `port`: several sockets may share it, and the figures of its
        interface."""
        return str(self.entries[port]["address"])
