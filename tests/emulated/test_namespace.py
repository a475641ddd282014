import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from commlayer.tools.emulate import namespace
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario


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
    monkeypatch.setattr(namespace, "_capabilities", lambda: -1)
    monkeypatch.setenv("PATH", "")
    assert "nft" in str(namespace.missing())
    assert "nftables" in str(namespace.missing())


@pytest.mark.parametrize(
    ("bits", "lacking"),
    [
        (0, "CAP_NET_ADMIN and CAP_SYS_ADMIN, .*--cap-add NET_ADMIN and --cap-add SYS_ADMIN"),
        (1 << 12, "CAP_SYS_ADMIN, .*--cap-add SYS_ADMIN"),
        (1 << 21, "CAP_NET_ADMIN, .*--cap-add NET_ADMIN"),
    ],
)
def test_missing_capabilities_are_named(monkeypatch: pytest.MonkeyPatch, bits: int, lacking: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespace, "_capabilities", lambda: bits)
    assert re.search(f"namespaces need {lacking}", str(namespace.missing()))


@pytest.mark.needs_root
def test_a_root_without_capabilities_knows_it() -> None:
    assert namespace._capabilities() >> 21 & 1
    ask = "from commlayer.tools.emulate import namespace; print(namespace.missing())"
    without = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    done = subprocess.run([*without, sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("network namespaces need CAP_SYS_ADMIN, ")


def test_an_error_in_spite_of_capabilities_has_a_remedy() -> None:
    with pytest.raises(namespace.EmulationError, match=r"Operation not permitted; .*--privileged"):
        namespace.call("sh /dev/stdin", "echo mount: Operation not permitted >&2; exit 1")
    with pytest.raises(namespace.EmulationError, match=r": no$"):
        namespace.call("sh /dev/stdin", "echo no >&2; exit 1")


def own_network() -> Path:
    return Path("/proc/thread-self/ns/net").readlink()


@pytest.mark.needs_root
def test_a_socket_inside_belongs_there_and_the_thread_does_not_stay() -> None:
    own = own_network()
    with Network(Scenario(hosts=1)) as network:
        with namespace.open_socket(network.name(0)) as inside:
            inside.bind((network.address(0), 0))  # no other host has this address
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
