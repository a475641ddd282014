from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from commlayer.emulate import namespace
from commlayer.emulate.network import Network
from commlayer.emulate.scenario import Scenario


def test_name_tells_the_process_and_its_start() -> None:
    name = namespace.prefix(3) + "h0"
    assert name.startswith(f"cl{os.getpid()}-")
    assert namespace._OWNED.match(name)


def test_the_name_of_a_process_may_hold_anything() -> None:
    # the field after the name is counted from its closing parenthesis
    assert namespace._started(os.getpid()) == namespace._started(os.getpid())
    assert namespace._started(1) != namespace._started(os.getpid())
    assert namespace._started(2**22 + 1) is None


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "nft" in str(namespace.missing())
    assert "nftables" in str(namespace.missing())


def own_network() -> Path:
    return Path("/proc/thread-self/ns/net").readlink()


@pytest.mark.needs_root
def test_a_socket_inside_belongs_there_and_the_thread_does_not_stay() -> None:
    own = own_network()
    with Network(Scenario(hosts=1)) as network:
        with namespace.open_socket(network.name(0)) as inside:
            inside.bind((network.address(0), 0))  # nobody else has this address
        assert own_network() == own
        with namespace.inside(network.name(0)):
            assert own_network() != own
            seen: list[Path] = []
            thread = threading.Thread(target=lambda: seen.append(own_network()))
            thread.start()
            thread.join()
            assert len(seen) == 1  # a thread that starts here starts there, others do not move
            assert {name for _, name in socket.if_nameindex()} == {"lo", "eth0"}
    assert own_network() == own
