"""Whether the probe notices that its own machine is too busy to judge the network."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commlayer.tools.probe import command, cpu
from commlayer.tools.probe.cpu import STARVED, Cpu
from commlayer.tools.probe.findings import find
from commlayer.tools.probe.flow import Flow
from commlayer.tools.probe.packets import Port
from commlayer.tools.probe.path import PHASES
from commlayer.tools.probe.sample import Crossed, Sample
from commlayer.tools.probe.view import suspects
from tests.unit.probe.jobs import hosts
from tests.unit.probe.loopback import COOKIE, measurement
from tests.unit.probe.samples import view

BUSY = "while True: pass"


@contextlib.contextmanager
def crowded_cpu() -> Iterator[None]:
    """This thread shares one CPU with a process that never sleeps."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    other = subprocess.Popen([sys.executable, "-c", BUSY])  # inherits the CPU
    try:
        yield
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count it")
def test_a_thread_knows_how_long_it_waits_for_a_cpu() -> None:
    with crowded_cpu():
        before = cpu.read()
        end_s = time.thread_time() + 0.3
        while time.thread_time() < end_s:
            pass
        share = before.wait_until(cpu.read())
    assert share > 0.1  # of two that want it, each gets about a half; the other one needs a moment to start
    assert Cpu(7.0, 3.0).wait_until(Cpu(8.0, 3.25)) == 0.25
    assert Cpu(7.0, 3.0).wait_until(Cpu(7.001, 3.001)) == 0.0  # too little to tell


def test_waiting_for_a_cpu_is_not_waiting_for_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that finds its buffer full sleeps; that another program has the CPU when it wakes is no fault of the
    network."""

    class Full(Port):
        def _send_segments(self, *_: object) -> None:
            raise BlockingIOError

    clock = iter(range(1_000_000))
    monkeypatch.setattr("select.select", lambda *_: ([], [], []))
    port = Full("127.0.0.1", COOKIE)
    try:
        for waited, is_blocked in ((lambda: 0.0, True), (lambda: 1.0 * next(clock), False)):
            monkeypatch.setattr(cpu, "waited_s", waited)
            sent = port.blast((port.address, port.number), run=1, size=1000, seconds=0.02, most=10)
            assert (sent.packets, sent.blocked_s > 0) == (0, is_blocked)
    finally:
        port.close()


def test_a_measurement_tells_how_long_both_ends_waited() -> None:
    with measurement() as each:
        sample = each.measure(PHASES)
    assert set(sample.cpu_waits) == set(PHASES[1:])
    assert all(0.0 <= share <= 1.0 for waits in sample.cpu_waits.values() for share in waits)


def test_the_receiver_tells_how_long_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(Cpu(float(number), 0.75 * number) for number in range(1000))  # it waits for three quarters of it
    monkeypatch.setattr("commlayer.tools.probe.responder.cpu.read", lambda: next(readings))
    with measurement() as each:
        sample = each.measure(("rate",))
    assert sample.cpu_waits["rate"][1] == 0.75


def starved(each: Sample, *, source: float = 0.0, target: float = 0.0) -> None:
    """A path that looks like one with two links, of which one is bad, and that gets less when all hosts send; the
    probe waits for a CPU."""
    each.flows = [Flow(4000 + port, 200.0 + 900 * (port % 3), 250, 8 * (port < 3), 8 * (port < 3)) for port in range(8)]
    each.flows_rate_bps = 2 * each.rate_bps
    each.rtt_us = [200.0 + 2000 * (each.way.source == 0), 9000.0]
    each.crossed = Crossed(40e6, False, [900.0, 4000.0], 1000, 0)
    each.cpu_waits = {key: [source, target] for key in (*PHASES[1:], "crossed")}


@pytest.mark.parametrize("ends", [{"source": 0.46}, {"target": 0.46}, {"source": 0.46, "target": 0.3}])
def test_a_busy_machine_is_the_only_finding(ends: dict[str, float]) -> None:
    found = view(4, 1, lambda path: starved(path, **ends))
    (finding,) = find(found)
    assert finding.kind == "cpu"
    assert finding.text == ("the CPU of every host is busy: the probe waited for it for up to 46% of the time")
    assert not [note for note in command._notes(hosts(4), found.samples) if "source port" in note or "at once" in note]
    assert suspects(found, is_loose=True)["crossed"]  # it may be idle at the second look


def test_without_waiting_the_same_figures_are_the_network() -> None:
    found = view(4, 1, lambda path: starved(path, source=STARVED / 2))
    assert {"links", "crossed", "rtt"} <= {finding.kind for finding in find(found)}
    assert [note for note in command._notes(hosts(4), found.samples) if "source port" in note]


def test_one_busy_host_is_named_and_the_others_are_judged() -> None:
    def fault(each: Sample) -> None:
        if each.way.source == 3:
            starved(each, source=0.6)
        if each.way.target == 2:
            each.mtu = 1400

    cpu_finding, mtu = find(view(4, 1, fault))
    assert cpu_finding.text.startswith("the CPU of host3 is busy: the probe waited for it for up to 60% of the time")
    assert mtu.kind == "mtu"


def test_a_second_pass_may_find_the_machine_idle() -> None:
    one, again = view(2).samples[0], view(2).samples[0]
    one.cpu_waits = {"rate": [0.5, 0.1], "rtt": [0.4, 0.0]}
    again.cpu_waits = {"rate": [0.1, 0.2], "flows": [0.3, 0.3]}
    one.add(again)
    assert one.cpu_waits == {"rate": [0.1, 0.2], "rtt": [0.4, 0.0], "flows": [0.3, 0.3]}
