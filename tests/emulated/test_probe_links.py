"""`commlayer probe` on networks with parallel links, and with an uplink that several hosts share."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.emulated.topology import parallel_links, two_switches
from tests.ranks import script_environ

pytestmark = [pytest.mark.needs_root, pytest.mark.slow, pytest.mark.timeout(480)]

_TRIES = 6  # on a machine whose cores are all busy, bursts of several processes may not meet, and nothing is judged


def probe(hosts: Sequence[str], first: str, path: Path, *options: str) -> dict[str, Any]:
    """The figures of a probe with a rank in each of these namespaces."""
    environ = script_environ() | {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": first, "MASTER_PORT": "29500"}
    command = [sys.executable, "-m", "commlayer", "probe", "--json", str(path), *options]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *command],
            cwd=ROOT,
            env=environ | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        said = [rank.communicate(timeout=250)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert path.exists(), said
    figures: dict[str, Any] = json.loads(path.read_text())
    print(said[0])
    return figures


def test_a_bad_link_of_two_is_found_by_the_source_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLAYER_IFNAME", "svc0")
    with parallel_links(rate_mbit_s=40, lost_percent=5) as hosts:
        # 500 packets of each port: with 80, losses of 5 % of some and none of others may be chance
        options = ("--packets", "6000", "--burst", "400K", "--ports", "12")
        for _ in range(_TRIES):
            figures = probe(hosts, "10.99.0.1", tmp_path / "probe.json", *options)
            there = next(path for path in figures["paths"] if path["source"] == 0)
            found = [entry for entry in figures["findings"] if entry["kind"] == "links"]
            if found and there["flows_rate_bps"] > 1.3 * there["rate_bps"]:
                break
    (finding,) = found
    assert [(way["source"], way["target"]) for way in finding["ways"]] == [(0, 1)]
    assert "all through 10.99.11.2" in finding["text"]
    traced = [flow for flow in there["flows"] if flow["route"]]  # routers limit how often they answer
    assert {tuple(flow["route"]) for flow in traced} == {("10.99.10.2",), ("10.99.11.2",)}
    for flow in traced:
        assert (flow["lost"] >= 0.01 * flow["sent"]) == (flow["route"] == ["10.99.11.2"]), flow
    assert there["flows_rate_bps"] > 1.3 * there["rate_bps"]
    (note,) = [text for text in figures["notes"] if "source port" in text]
    assert note.startswith("the network chooses among at least 2 links by source port")
    assert note.endswith("set COMMLAYER_PORTS=4")


def test_a_shared_uplink_is_found_when_all_send_at_once(tmp_path: Path) -> None:
    options = ("--packets", "200", "--burst", "2M", "--ports", "1")
    with two_switches(rate_mbit_s=40) as hosts:
        for _ in range(_TRIES):
            figures = probe(hosts, "10.98.0.1", tmp_path / "probe.json", *options)
            found = [entry for entry in figures["findings"] if entry["kind"] == "crossed"]
            crossed = {(way["source"], way["target"]) for entry in found for way in entry["ways"]}
            shares = [
                path["crossed"]["rate_bps"] / path["rate_bps"]
                for path in figures["paths"]
                if (path["source"], path["target"]) in crossed
            ]
            if found and 0.3 < min(shares) <= max(shares) < 0.67:
                break
    (finding,) = found  # busy cores also let packets overtake each other, which the probe names, too
    assert crossed <= {(0, 2), (1, 3), (2, 0), (3, 1)}  # on a busy machine not every burst meets another
    assert f"{len(crossed)} of 8 directions carry" in finding["text"]
    assert 0.3 < min(shares) <= max(shares) < 0.67
