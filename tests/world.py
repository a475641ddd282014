"""A job whose ranks are threads of this process: an `Engine` each, joined by memory or UDP, some sharing memory.

All engines of one process have the same process id, so shared memory works here exactly as between processes.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from commlayer.config import Config
from commlayer.transport.group import NativeGroup
from commlayer.transport.joining import join
from commlayer.transport.members import Members
from commlayer.transport.native import Engine
from commlayer.transport.status import ffi

T = TypeVar("T")

NATIVE = Path(__file__).parents[1] / "native"

PATIENCE_S = 30.0
"""The longest wait for an expected event: a test that hangs ends."""

_jobs = itertools.count(1)


@functools.cache
def _mem_wire_library() -> ctypes.CDLL:
    """native/tests/mem_wire.c, compiled by itself: the engine's module has no wires for tests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mem_wire.so"
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-shared", "-fPIC", f"-I{NATIVE}", f"-I{NATIVE / 'include'}"]
        subprocess.run(["cc", *flags, "-o", path, NATIVE / "tests" / "mem_wire.c"], check=True)
        return ctypes.CDLL(str(path))


def mem_wire(loss: float) -> Any:
    """The `struct cl_wire_type *` of a wire within this process that loses this share of the datagrams."""
    library = _mem_wire_library()
    library.mem_wire_lose(ctypes.c_double(loss))
    return ffi.cast("struct cl_wire_type *", ctypes.addressof(ctypes.c_char.in_dll(library, "mem_wire")))


class Exchange:
    """All-gather between the threads of a world, as the Store's: `exchange(rank)(step, value)`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[str, dict[int, bytes]] = {}
        self._changed = threading.Condition()

    def __call__(self, rank: int) -> Callable[[str, bytes], list[bytes]]:
        def exchange(step: str, value: bytes) -> list[bytes]:
            with self._changed:
                values = self._values.setdefault(step, {})
                assert rank not in values
                values[rank] = value
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: len(values) == self._size, PATIENCE_S):
                    raise TimeoutError(step)
                return [values[member] for member in range(self._size)]

        return exchange


def flat(size: int) -> list[tuple[int, ...]]:
    """Hosts of one rank each."""
    return [(rank,) for rank in range(size)]


class World:
    """Engines of a job. `hosts` says which ranks share memory, as `base.Group.hosts` does; `mtus`, if there are any, is
    each rank's."""

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        wire: str = "mem",
        loss: float = 0.0,
        mtus: Sequence[int] = (),
        **config: Any,
    ) -> None:
        if wire == "ofi":
            config |= {"wire": wire, "ofi_provider": "udp"}  # the provider every machine has
        self.hosts = tuple(tuple(host) for host in hosts)
        self.size = sum(map(len, hosts))
        self.job = next(_jobs)
        self.key = os.urandom(16)
        self.paired = False
        """Whether each two ranks use a key of their own."""
        self._groups = itertools.count(1)
        self.threads = ThreadPoolExecutor(2 * self.size)
        host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
        self.engines = []
        wire_type = mem_wire(loss) if wire == "mem" else ffi.NULL
        self.descriptions: list[dict[str, Any]] = []
        for rank in range(self.size):
            # UDP: all of 127.0.0.0/8 is ours, and taken for a network here. mem: addresses mean nothing to it.
            port = {"ifname": wire, "address": f"127.0.0.{rank + 1}", "prefix": 8, "mtu": mtus[rank] if mtus else 1500}
            port |= {"loopback": False, "running": True, "version": 4}
            ports = [] if wire == "none" else [port]
            self.engines.append(Engine(Config(**config), ports, wire, wire_type))
            host = f"host {host_of[rank]}"
            self.descriptions.append({**self.engines[rank].describe(), "peer": rank, "host": host})

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self.threads.shutdown()
        for engine in self.engines:
            engine.close()

    def on_each(self, body: Callable[[int], T]) -> list[T]:
        """Runs `body(rank)` on a thread per rank; when all are done, raises the error of the lowest failed rank."""
        futures = [self.threads.submit(body, rank) for rank in range(self.size)]
        wait(futures, PATIENCE_S)
        return [future.result(PATIENCE_S) for future in futures]

    def open_group(self, exchange: Callable[[int], Callable[[str, bytes], list[bytes]]] | None = None) -> Team:
        """A new group of all ranks."""
        meet = exchange or Exchange(self.size)
        number = next(self._groups)

        def connect(rank: int) -> NativeGroup:
            return join(
                self.engines[rank],
                Members(f"group {number}", rank, range(self.size)),
                self.descriptions,
                meet(rank),
                job=self.job,
                key=self.key,
                group=number,
                paired=self.paired,
            )

        return Team(self, self.on_each(connect))


class Team:
    """The ends of one group, by rank; closes them."""

    def __init__(self, world: World, groups: Sequence[NativeGroup]) -> None:
        self.world = world
        self.groups = groups

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *error: object) -> None:
        for group in self.groups:
            group.close()

    def __getitem__(self, rank: int) -> NativeGroup:
        return self.groups[rank]


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition that must come true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def open_descriptors() -> int:
    """How many file descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))
