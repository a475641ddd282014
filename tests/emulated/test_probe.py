"""`commlayer probe` on emulated hosts: it names the faults that are there, and no others."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from tests import ROOT
from tests.ranks import script_environ

pytestmark = pytest.mark.needs_root

QUICK = ("--packets", "600", "--burst", "600K")


def start(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=script_environ(), capture_output=True, text=True, timeout=250)


def probe(folder: Path, scenario: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the figures and the output of rank 0."""
    path = folder / "probe.json"
    command = [sys.executable, "-m", "commlayer", "emulate", scenario, "--", sys.executable, "-m", "commlayer", "probe"]
    done = start([*command, "--json", str(path), *QUICK, *options])
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(path.read_text()), done.stdout


def places(figures: dict[str, Any]) -> list[tuple[str, str, int, str | None]]:
    """What the findings name, but for a busy CPU: one machine is all hosts, and other programs may run on it."""
    subjects = [(finding["kind"], finding["subject"]) for finding in figures["findings"] if finding["kind"] != "cpu"]
    return [(kind, subject["direction"], subject["host"], subject["nic"]) for kind, subject in subjects]


@pytest.mark.slow
def test_three_faults_are_named_and_nothing_else(tmp_path: Path) -> None:
    status, figures, out = probe(tmp_path, "three_faults")
    assert places(figures) == [
        ("rate", "both", 3, "eth0"),
        ("loss", "receiving", 2, None),
        ("dscp", "receiving", 1, "eth1"),
    ], out
    assert status == 3
    lines = [line.removeprefix("[0] ") for line in out.splitlines()]
    assert lines[0].startswith(f"{len(figures['findings'])} findings (4 hosts, 24 directions")
    assert max(len(line) for line in out.splitlines()) <= 80
    slow = [path for path in figures["paths"] if path["source"] == 3 and path["source_nic"] == "eth0"]
    assert all(15e6 < path["rate_bps"] < 23e6 for path in slow)
    lossy = [path for path in figures["paths"] if path["target"] == 2]
    sent, lost, bursts = (sum(path[name] for path in lossy) for name in ("sent", "lost", "bursts"))
    assert 0.008 < lost / sent < 0.04
    assert 2 < lost / bursts < 7


def test_ssh_starts_the_ranks_and_a_clean_network_has_no_findings(tmp_path: Path) -> None:
    json_path = tmp_path / "probe.json"
    with Network(Scenario(hosts=3, nics=(Link(rate_bps=100e6),))) as network:
        hosts = ["10.87.0.1", "host1", "me@host2"]
        lines = [
            f'{name}) exec {shlex.join(network.command(host, ["sh", "-c"]))} "$2" ;;' for host, name in enumerate(hosts)
        ]
        ssh = tmp_path / "ssh"  # its words: host, command
        ssh.write_text("\n".join(["#!/bin/sh", 'case "$1" in', *lines, "*) exit 255 ;;", "esac", ""]))
        ssh.chmod(0o755)
        command = [sys.executable, "-m", "commlayer", "probe", "--ssh", str(ssh), "--json", str(json_path), *QUICK]
        done = start([*command, "--hosts", ",".join(hosts)])
    figures = json.loads(json_path.read_text())
    assert places(figures) == [], done.stdout + done.stderr
    is_busy = bool(figures["findings"])
    assert done.returncode == (3 if is_busy else 0)
    assert done.stdout.startswith("1 finding (" if is_busy else "No findings")
    rates = [path["rate_bps"] for path in figures["paths"]]
    assert len(rates) == 6
    assert all(85e6 < rate < 110e6 for rate in rates)
    assert {path["mtu"] for path in figures["paths"]} == {1500}


@pytest.mark.slow
def test_a_busy_machine_is_named_and_nothing_else(tmp_path: Path) -> None:
    """Programs that never sleep have the CPUs; the emulated network is without faults. Each is a session of its own:
    with autogroups, the kernel divides CPUs among sessions first, and those of one session would take the share of one.
    """
    with contextlib.ExitStack() as stack:
        cpus = os.sched_getaffinity(0)
        stack.callback(os.sched_setaffinity, 0, cpus)
        os.sched_setaffinity(0, {min(cpus)})  # the hosts and these programs share one CPU; other tests have the others
        for _ in range(4):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
            stack.callback(busy.kill)
        status, figures, out = probe(tmp_path, "clean200")
    assert [finding["kind"] for finding in figures["findings"]] == ["cpu"], out
    assert status == 3
    assert not [note for note in figures["notes"] if "source port" in note]
