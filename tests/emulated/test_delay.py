import subprocess
import sys

import pytest

from commlayer.tools.emulate import delay
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.namespace import EmulationError
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario, Unlike

ECHO = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(60)
if sys.argv[1] == "serve":
    s.bind(("", 7000))
    print("ready", flush=True)
    while True:
        s.sendto(*s.recvfrom(100))
times = []
for _ in range(20):  # a busy machine is late at most of them
    start = time.monotonic()
    s.sendto(b"x", (sys.argv[1], 7000))
    s.recv(10)
    times.append(time.monotonic() - start)
print(min(times) * 1e3)
"""


@pytest.mark.needs_root
def test_round_trip_is_the_sum_of_both_delays() -> None:
    scenario = Scenario(hosts=2, nics=(Link(delay_ms=30),), links=(Unlike(host=1, delay_ms=10),))
    with Network(scenario) as network:
        assert network.delayed_by in ("netem", "netfilter queue")
        with network.popen(1, [sys.executable, "-c", ECHO, "serve"], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            measured_ms = float(network.run(0, [sys.executable, "-c", ECHO, network.address(1)]))
            server.kill()
    assert 39.9 <= measured_ms < 80


HELD = """
import socket, struct, time
SO_TIMESTAMPNS = 35
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
s.settimeout(60)
s.bind(("", 7000))
print("ready", flush=True)
held_s = []
for _ in range(20):
    _, ancillary, _, _ = s.recvmsg(100, 100)
    seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
    held_s.append(time.time() - seconds - nanoseconds * 1e-9)
print(min(held_s) * 1e3, flush=True)
"""

SEND = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(20):
    s.sendto(b"x", (sys.argv[1], 7000))
    time.sleep(0.01)
"""


@pytest.mark.needs_root
def test_the_kernel_stamps_packets_when_they_have_travelled() -> None:
    """Else a transport that reads the stamps takes the delay for time that the receiving host held the packets."""
    with (
        Network(Scenario(hosts=2, nics=(Link(delay_ms=30),))) as network,
        network.popen(1, [sys.executable, "-c", HELD], stdout=subprocess.PIPE) as receiver,
    ):
        assert receiver.stdout is not None
        receiver.stdout.readline()
        network.run(0, [sys.executable, "-c", SEND, network.address(1)])
        held_ms = float(receiver.stdout.readline())
    assert 0 <= held_ms < 15


@pytest.mark.needs_root
def test_without_delay_nothing_is_held() -> None:
    with Network(Scenario()) as network:
        assert network.delayed_by is None


@pytest.mark.needs_root
def test_a_kernel_that_cannot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_queue(number: int) -> None:
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr(delay, "has_netem", lambda _namespace: False)
    monkeypatch.setattr(delay, "_bind", no_queue)
    scenario = Scenario(nics=(Link(delay_ms=3),))
    with pytest.raises(EmulationError, match=r"delay_ms = 3: .*neither netem nor netfilter queues"), Network(scenario):
        pass


def test_netem_gets_the_delay_behind_an_intermediate_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str | None]] = []
    monkeypatch.setattr(delay, "call", lambda command, text=None: calls.append((command, text)))
    delay.add_netem("space", 1, "eth1", Link(delay_ms=2.5))
    assert calls[0] == ("ip -n space link add ifb1 type ifb", None)
    batch = str(calls[-1][1])
    assert "dev ifb1 root netem delay 2.5ms" in batch
    assert "dev eth1 parent ffff:" in batch
    assert "redirect dev ifb1" in batch
