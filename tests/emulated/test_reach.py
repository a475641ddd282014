"""Firewalls between emulated hosts: packets are tried at the start, and the error names ranks, hosts and interface."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.ranks import script_environ

pytestmark = pytest.mark.needs_root

REFUSED = """
import time, torch.distributed as dist, commlayer
start = time.monotonic()
try:
    dist.init_process_group("commlayer")
except commlayer.UnreachableError as error:
    print(f"{time.monotonic() - start:.1f} s: {error}")
"""


def outputs(tmp_path: Path, scenario: str, rule: str, *arguments: str) -> tuple[list[str], str]:
    """The lines that the ranks of a Python program print, rank by rank, and stderr. Host 1 drops the UDP packets that
    match `rule`."""
    (tmp_path / "s.toml").write_text(scenario)
    drop = f"test $RANK != 1 || iptables -I INPUT -p udp {rule} -j DROP"
    job = ["sh", "-c", f'{drop} && exec "$@"', "sh", sys.executable, *arguments]
    command = [sys.executable, "-m", "commlayer", "emulate", str(tmp_path / "s.toml"), "--", *job]
    environ = script_environ(COMMLAYER_PORT_RANGE="20000-20009")
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines()), done.stderr


def test_a_firewall_that_drops_packets_is_an_error_on_both_ranks(tmp_path: Path) -> None:
    lines, _ = outputs(tmp_path, "hosts = 2", "--dport 20000:20009", "-c", REFUSED)
    text = (
        r"no UDP packet from rank 0 \([^ ,]+, 10\.87\.0\.1:2000\d via eth0\) to rank 1 \([^ ,]+, 10\.87\.0\.2:2000\d\) "
        r"in 3 s: firewall of [^ ,]+, or the wrong interface\? \(COMMLAYER_IFNAME, COMMLAYER_PORT_RANGE\)"
    )
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        found = re.fullmatch(rf"\[{rank}\] (\d+\.\d) s: rank {rank} of group '0': {text}", line)
        assert found, line
        assert 3.0 <= float(found[1]) < 30.0


@pytest.mark.slow
def test_one_of_two_interfaces_behind_a_firewall_is_a_warning(tmp_path: Path) -> None:
    check = ("-m", "commlayer", "check", "--size", "1M")
    lines, warnings = outputs(tmp_path, "hosts = 2\n[[nic]]\n[[nic]]", "-i eth1", *check)
    for rank in range(2):
        assert [
            line for line in lines if re.match(rf"\[{rank}\] rank {rank} of 2 on .*: all_reduce of 1 MiB in ", line)
        ]
        for nic, state in (("eth0", "works"), ("eth1", "DOES NOT WORK")):
            path = rf"\[{rank}\] rank {rank} to rank {1 - rank}: {nic} \S+ to \S+ {state}, "
            assert [line for line in lines if re.match(path, line)]
    for rank, way in ((0, "to"), (1, "from")):
        assert re.search(
            rf"\[{rank}\].* no UDP packet {way} rank {1 - rank} \([^ ]+ [^ ]+ via eth1\) in 1 s;", warnings
        )
