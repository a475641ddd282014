import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from commlayer.tools.emulate import namespace, tcp
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.namespace import EmulationError
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from tests import ROOT
from tests.world import until

needs_root = pytest.mark.needs_root

SERVE = """
    import socket
    server = socket.create_server(("", 7000))
    print("ready", flush=True)
    connection, _ = server.accept()
    total = 0
    while data := connection.recv(1 << 16):
        total += len(data)
    connection.sendall(b"done")
"""
SEND = """
    import socket, sys, time
    connection = socket.create_connection((sys.argv[1], 7000))
    start = time.monotonic()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(4)
    print(time.monotonic() - start)
"""


def network_of(hosts: int, nics: int = 1, **link: Any) -> Network:
    return Network(Scenario(hosts=hosts, nics=(Link(**link),) * nics))


def python(source: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(source), *arguments]


def existing() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def transfer_s(network: Network, size_bytes: int) -> float:
    """Seconds to send `size_bytes` from host 0 to host 1 by TCP."""
    with network.popen(1, python(SERVE), stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        return float(network.run(0, python(SEND, network.address(1), str(size_bytes))))


@needs_root
def test_hosts_reach_each_other_and_are_removed() -> None:
    with network_of(3) as network:
        names = {network.name(host) for host in range(3)} | {network.switch}
        assert names <= set(existing())
        assert transfer_s(network, 1000) > 0
    assert names.isdisjoint(existing())


@needs_root
def test_nothing_is_left_when_the_body_raises() -> None:
    network = network_of(1)
    with pytest.raises(KeyError), network:
        raise KeyError
    assert network.name(0) not in existing()
    assert network.switch not in existing()


@needs_root
def test_the_machines_own_interfaces_are_left_alone() -> None:
    before = socket.if_nameindex()
    with network_of(2, nics=2):
        assert socket.if_nameindex() == before


@needs_root
def test_rate_is_the_requested_one() -> None:
    with network_of(2, rate_bps=20e6) as network:
        size_bytes = 2_000_000
        elapsed_s = transfer_s(network, size_bytes)
    # The upper bound is the shaper's promise: beyond the burst of 64 KB no more than the rate comes through. How much
    # slower it is depends on the machine; ten times would mean that the shaper starves TCP.
    ideal_s = (size_bytes - 2 * 65536) * 8 / 20e6
    assert ideal_s < elapsed_s < 10 * ideal_s


@needs_root
def test_rate_and_buffer_are_set_on_both_ends_of_the_link() -> None:
    with network_of(1, rate_bps=200e6, buffer_packets=77) as network:
        for namespace, device in ((network.name(0), "eth0"), (network.switch, "h0n0")):
            show = ["tc", "-n", namespace, "-d"]
            classes = subprocess.run(
                [*show, "class", "show", "dev", device], capture_output=True, text=True, check=True
            )
            queues = subprocess.run([*show, "qdisc", "show", "dev", device], capture_output=True, text=True, check=True)
            assert "rate 200Mbit" in classes.stdout
            assert "quantum 1514" in classes.stdout
            assert f"limit {77 * 1514}b" in queues.stdout


@needs_root
def test_half_of_the_packets_are_lost() -> None:
    probe = """
        import socket, sys
        out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for number in range(400):
            out.sendto(b"x", (sys.argv[1], 7001))
    """
    with network_of(2, loss=0.5) as network:
        network.run(0, python(probe, network.address(1)))
        # no socket listens: each datagram that arrived was counted as one without a port
        deadline = time.monotonic() + 30
        arrived = 0
        while arrived <= 120 and time.monotonic() < deadline:
            counters = [line.split() for line in network.run(1, ["cat", "/proc/net/snmp"]).splitlines()]
            names, values = (line for line in counters if line[0] == "Udp:")
            arrived = int(dict(zip(names, values, strict=True))["NoPorts"])
    assert 120 < arrived < 280  # 200 expected, 10 its standard deviation


@needs_root
def test_without_loss_there_is_no_rule() -> None:
    with network_of(1) as network:
        assert network.run(0, ["nft", "list", "ruleset"]) == ""


@needs_root
def test_offloads_are_off_unless_asked_for() -> None:
    for offloads, state in ((False, "off"), (True, "on")):
        with network_of(1, offloads=offloads) as network:
            features = network.run(0, ["ethtool", "-k", "eth0"])
            assert f"tcp-segmentation-offload: {state}" in features


@needs_root
def test_several_nics_have_networks_of_their_own() -> None:
    with network_of(2, nics=2) as network:
        assert network.address(1, 0) != network.address(1, 1)
        for nic in range(2):
            assert f"dev eth{nic}" in network.run(0, ["ip", "route", "get", network.address(1, nic)])


@needs_root
def test_hosts_do_not_share_memory_or_a_name() -> None:
    mark = f"/dev/shm/commlayer-test-{os.getpid()}"  # noqa: S108  # the test is about shared memory
    with network_of(2) as network:
        network.run(0, ["touch", mark])
        for host, seen in ((0, True), (1, False)):
            assert ("there" in network.run(host, ["sh", "-c", f"test -e {mark} && echo there || echo gone"])) is seen
        assert not Path(mark).exists()
        assert network.run(0, ["hostname"]) != network.run(1, ["hostname"])


@needs_root
def test_congestion_control_is_per_namespace_and_the_list_is_put_back() -> None:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    before = allowed.read_text()
    algorithm = available.read_text().split()[-1]
    with network_of(2) as network:
        tcp.allow([algorithm])
        setting = "/proc/sys/net/ipv4/tcp_congestion_control"
        network.run(0, ["sh", "-c", f"echo {algorithm} > {setting}"])
        assert network.run(0, ["cat", setting]).strip() == algorithm
    # Emulations of other tests keep what they need, and the last of them puts the list back after its namespaces.
    until(lambda: set(allowed.read_text().split()) <= set(before.split()) or bool(namespace.owned()))


@needs_root
def test_unknown_congestion_control_is_an_error() -> None:
    with network_of(1), pytest.raises(EmulationError, match="nonesuch"):
        tcp.allow(["nonesuch"])


@needs_root
def test_namespaces_of_a_crashed_run_are_removed_and_those_of_a_live_one_stay() -> None:
    crash = "from commlayer.tools.emulate.network import *; import os; Network(Scenario()).__enter__(); os._exit(0)"
    crashed = subprocess.Popen([sys.executable, "-c", crash], cwd=ROOT)
    assert crashed.wait() == 0
    left = [name for name in existing() if name.startswith(f"cl{crashed.pid}-")]
    with network_of(1) as alive:
        assert left  # the crash did leave something
        assert not set(left) & set(existing())
        namespace.remove_stale()
        assert alive.name(0) in existing()


@pytest.mark.slow
@needs_root
def test_bench_in_namespaces(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "commlayer", "bench", "--backends", "gloo", "--tcp-cc", "reno,bbr"]
    command += ["--netns", "2", "--rate", "100M", "--sizes", "64K", "--rounds", "1", "--iters", "2", "--json", str(out)]
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text()
    if not {"reno", "bbr"} <= set(available.split()):
        pytest.skip(f"this kernel has {available.strip()} only")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["link"]["rate_bps"] == 100e6
    assert document["link"]["hosts"] == 2
    used = {result["backend"]: result["tcp_congestion_control"] for result in document["results"]}
    assert used == {"gloo/reno": ["reno"], "gloo/bbr": ["bbr"]}
    for result in document["results"]:
        assert 0 < result["link_share"] < 1


@pytest.mark.slow
@needs_root
def test_terminated_bench_leaves_nothing() -> None:
    command = [sys.executable, "-m", "commlayer", "bench", "--backends", "gloo", "--netns", "2", "--rounds", "1000"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline().startswith("#")  # the ranks run
        bench.terminate()
    assert bench.returncode == 128 + signal.SIGTERM
    assert not [name for name in existing() if name.startswith(f"cl{bench.pid}-")]


def test_without_root_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EmulationError, match="root"), network_of(1):
        pass
