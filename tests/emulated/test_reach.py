"""Firewalls between emulated hosts: packets are tried at the start, and the error names ranks, hosts and interface."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.ranks import script_environ

pytestmark = pytest.mark.needs_root

SCRIPT = """
import time, torch, torch.distributed as dist, commlayer
start = time.monotonic()
try:
    dist.init_process_group("commlayer")
except commlayer.UnreachableError as error:
    print(f"{time.monotonic() - start:.1f} s: {error}")
else:
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    print("sum", tensor[0].item())
    dist.destroy_process_group()
"""


def outputs(tmp_path: Path, scenario: str, rules: str) -> tuple[list[str], str]:
    """The lines that the ranks print, rank by rank, and stderr; host 1 drops arriving packets that match `rules`."""
    (tmp_path / "s.toml").write_text(scenario)
    (tmp_path / "job.py").write_text(SCRIPT)
    drop = "; ".join(f"iptables -I INPUT -p udp {rule} -j DROP" for rule in rules.split(";"))
    job = ["sh", "-c", f"set -e; test $RANK != 1 || {{ {drop}; }}; exec {sys.executable} {tmp_path / 'job.py'}"]
    command = [sys.executable, "-m", "commlayer", "emulate", str(tmp_path / "s.toml"), "--", *job]
    environ = script_environ(COMMLAYER_PORT_RANGE="20000-20009")
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines()), done.stderr


def test_a_firewall_that_drops_packets_is_an_error_on_both_ranks(tmp_path: Path) -> None:
    lines, _ = outputs(tmp_path, "hosts = 2", "--dport 20000:20009")
    text = (
        r"no UDP packet from rank 0 \([^ ,]+, 10\.87\.0\.1:2000\d via eth0\) to rank 1 \([^ ,]+\) in 3 s: firewall, or "
        r"the wrong interface\? \(COMMLAYER_IFNAME, COMMLAYER_PORT_RANGE\)"
    )
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        found = re.fullmatch(rf"\[{rank}\] (\d+\.\d) s: rank {rank} of group '0': {text}", line)
        assert found, line
        assert 3.0 <= float(found[1]) < 15.0


def test_one_of_two_interfaces_behind_a_firewall_is_a_warning(tmp_path: Path) -> None:
    lines, warnings = outputs(tmp_path, "hosts = 2\n[[nic]]\n[[nic]]", "-i eth1")
    assert lines == ["[0] sum 2.0", "[1] sum 2.0"]
    for rank, way in ((0, "to"), (1, "from")):
        assert re.search(
            rf"\[{rank}\].* no UDP packet {way} rank {1 - rank} \([^ ]+ [^ ]+ via eth1\) in 1 s;", warnings
        )
