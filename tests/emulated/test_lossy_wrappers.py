"""DDP in 16 bits with bounded loss over emulated links that lose packets: torch's wrappers around our hook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from tests import ROOT

TIMEOUT_S = 240


@pytest.fixture(scope="module")
def found() -> list[Any]:
    """What each rank of a job says."""
    with Network(Scenario(hosts=2, nics=(Link(loss=0.02),))) as network:
        ranks = []
        for rank in range(2):
            environ = {**os.environ, **network.rendezvous(), "RANK": str(rank), "WORLD_SIZE": "2"}
            environ["PYTHONPATH"] = str(ROOT)
            command = [sys.executable, "-m", "tests.emulated.lossy_wrappers"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            ranks.append(network.popen(rank, command, env=environ, cwd=ROOT, **pipes))
        outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
        for process, (_, errors) in zip(ranks, outputs, strict=True):
            assert process.returncode == 0, errors
    return [json.loads(output) for output, _ in outputs]


@pytest.mark.needs_root
@pytest.mark.parametrize("wrapper", ["fp16", "bf16"])
def test_nothing_is_forgotten_in_16_bits(found: list[Any], wrapper: str) -> None:
    results = [each[wrapper] for each in found]
    assert len({each["digest"] for each in results}) == 1
    assert max(each["error"] for each in results) < 0.5  # rounding of averages; what is forgotten is at least 1
    assert sum(each["left"] for each in results) > 0


@pytest.mark.needs_root
def test_the_papers_rule_forgets(found: list[Any]) -> None:
    results = [each["papers"] for each in found]
    assert max(each["error"] for each in results) >= 1
    assert all(each["left"] == 0 for each in results)
