"""DDP with bounded loss over emulated links that lose packets: real processes, one per host."""

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
from tests.emulated.lossy_training import SIZES, STEPS

TIMEOUT_S = 450
pytestmark = pytest.mark.timeout(480)  # a busy machine takes minutes to start four ranks


@pytest.fixture(scope="module", params=[(0, 1), (0, 1, 2), (0, 0, 1, 1)], ids=str)
def found(request: pytest.FixtureRequest) -> list[Any]:
    """What each rank of a job says. The parameter is each rank's host."""
    hosts = request.param
    size = len(hosts)
    with Network(Scenario(hosts=max(hosts) + 1, nics=(Link(loss=0.02),))) as network:
        ranks = []
        for rank, host in enumerate(hosts):
            environ = {**os.environ, **network.rendezvous(), "RANK": str(rank), "WORLD_SIZE": str(size)}
            environ["PYTHONPATH"] = str(ROOT)
            command = [sys.executable, "-m", "tests.emulated.lossy_training"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            ranks.append(network.popen(host, command, env=environ, cwd=ROOT, **pipes))
        outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
        for process, (_, errors) in zip(ranks, outputs, strict=True):
            assert process.returncode == 0, errors
    return [json.loads(output) for output, _ in outputs]


@pytest.mark.needs_root
@pytest.mark.parametrize("policy", ["feedback", "protected", "schedule"])
def test_replicas_agree_and_nothing_is_forgotten(found: list[Any], policy: str) -> None:
    results = [each[policy] for each in found]
    assert len({each["digest"] for each in results}) == 1
    assert max(each["error"] for each in results) < 1e-3
    assert sum(each["left"] for each in results) > 0
    assert sum(each["twice"] for each in results) == 0  # in a row: nothing is more than a step late
    steps = STEPS - STEPS // 2  # since the state was loaded
    assert {each["averaged_bytes"] for each in results} == {4 * sum(SIZES) * steps}
    bound = {"feedback": 0.05, "protected": 0.2, "schedule": 0.2}[policy]
    assert (
        0 < sum(each["uncounted_bytes"] for each in results) <= bound * sum(each["averaged_bytes"] for each in results)
    )


@pytest.mark.needs_root
def test_what_the_sums_lack_is_what_the_ranks_were_told(found: list[Any]) -> None:
    results = [each["forgotten"] for each in found]
    uncounted = sum(each["uncounted_bytes"] for each in results)
    ranks_per_host = 2 if len(found) == 4 else 1  # what counts or not is the sum of a host, and one rank notes it
    assert results[0]["lacking_bytes"] == ranks_per_host * uncounted
    assert uncounted > 0


@pytest.mark.needs_root
def test_the_counters_tell_what_was_lost(found: list[Any]) -> None:
    total = {name: sum(each["stats"][name] for each in found) for name in found[0]["stats"]}
    sent = total["packets_sent"]
    assert 0.01 * sent < total["packets_lost"] < 0.2 * sent  # the links lose 2 %; a late packet is taken for lost
    assert 0 < total["packets_given_up"] < total["packets_lost"]
    assert total["messages_stopped"] > 0
    assert total["operations_failed"] == 0


@pytest.mark.needs_root
def test_rescaling_makes_up_at_once(found: list[Any]) -> None:
    results = [each["rescale"] for each in found]
    assert len({each["digest"] for each in results}) == 1
    assert all(each["exact"] for each in results)  # the mean of ones is one, whoever is missing
    assert all(each["integers"]["exact"] for each in found)
