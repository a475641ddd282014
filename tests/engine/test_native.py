"""Engines as Python sees them: their sockets, and the description of them for other ranks."""

import platform
import re
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from commlayer.config import Config
from commlayer.errors import ClosedError, CommError, ConfigError
from commlayer.transport import native
from tests.world import World, flat, until


def test_describe() -> None:
    with World(flat(1), "udp", shm=False) as world:
        description = world.engines[0].describe()
        assert description["ports"][0]["port"] > 0
        assert description["bell"].startswith("cl-")
        assert not description["shm"]
        assert description["host"] == native.host_key()


def test_the_thread_asks_for_short_time_slices() -> None:
    version = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if version < (6, 12) or not Path("/proc/self/sched").exists():
        pytest.skip(f"Linux {platform.release()} lets no thread choose its time slices, or does not tell them")
    with World(flat(1), "udp", shm=False):
        until(lambda: _slices_ns() == {"100000"})  # the thread has only just started


def _slices_ns() -> set[str]:
    """The settings of the engines' threads in this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text() == "commlayer\n":
            found |= set(re.findall(r"se\.slice\s*:\s*(\d+)", (task / "sched").read_text()))
    return found


def test_an_address_that_is_not_here() -> None:
    port = {"ifname": "eth7", "address": "192.0.2.1", "prefix": 24, "mtu": 1500, "loopback": False, "version": 4}
    with pytest.raises(CommError, match=r"opening the engine on eth7 192\.0\.2\.1"):
        native.Engine(Config(), [port])


def test_shared_engine() -> None:
    one = native.Engine.shared(Config())
    two = native.Engine.shared(Config())
    assert one is two
    one.release()
    assert two.describe()
    two.release()
    with pytest.raises(ClosedError):
        two.describe()
    three = native.Engine.shared(Config())
    assert three is not one
    three.release()


def test_a_private_engine_lives_until_its_last_use_ends() -> None:
    engine = native.Engine.private(Config())
    assert engine.use() is engine
    engine.release()
    assert engine.packet_bytes > 0
    engine.release()
    with pytest.raises(ClosedError):
        _ = engine.packet_bytes
    assert native.Engine.current() is None


def test_a_missing_libfabric_provider_or_interface_is_named(libfabric: None) -> None:
    port = {"ifname": "nic", "address": "192.0.2.1", "prefix": 8, "mtu": 1500, "loopback": False, "version": 4}
    with pytest.raises(ConfigError, match=r"nic 192.0.2.1: .*no datagram endpoint.*fi_info"):
        native.Engine(Config(wire="ofi", ofi_provider="udp"), [port])
    with pytest.raises(ConfigError, match="COMMLAYER_OFI_PROVIDER"):
        native.Engine(Config(wire="ofi", ofi_provider="pigeon"), [port])


def test_sockets_take_free_ports_of_the_range(loopback_port: dict[str, Any]) -> None:
    with closing(native.Engine(Config(), [loopback_port])) as other:
        taken = other.describe()["ports"][0]["port"]
        with pytest.raises(ConfigError) as caught:
            native.Engine(Config(port_range=(taken, taken)), [loopback_port])
        text = str(caught.value)
        assert text.startswith(f"COMMLAYER_PORT_RANGE={taken}-{taken}: no free UDP port on host ")
        where, needed = (
            f"{socket.gethostname()} (lo 127.0.0.1)",
            "COMMLAYER_PORTS=1, times COMMLAYER_THREADS, per process",
        )
        assert f"{where}; a host needs {needed}" in text
        first = min(taken, 65500)
        with closing(native.Engine(Config(port_range=(first, first + 35)), [loopback_port])) as engine:
            assert first <= engine.describe()["ports"][0]["port"] <= first + 35


@pytest.fixture
def loopback_port() -> dict[str, Any]:
    return {"ifname": "lo", "address": "127.0.0.1", "prefix": 24, "mtu": 1500, "loopback": True, "version": 4}


def test_interfaces() -> None:
    found = native.interfaces()
    assert any(port["loopback"] and port["address"] == "127.0.0.1" and port["prefix"] == 8 for port in found)
