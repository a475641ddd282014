"""The example of reinforcement learning, where transformers is installed: `make rollouts` has it."""

import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.process.test_metrics import free_port

LINE = re.compile(r"version (\d+): ([\d,]+) bytes \((whole|difference)\), a whole copy has ([\d,]+); bits equal")


@pytest.mark.timeout(240)
def test_rollout_workers_follow_and_the_reward_grows() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; make rollouts runs this")
    command = [sys.executable, str(ROOT / "examples" / "rl_rollout.py"), "--steps", "15", "--rate", "3e-4"]
    ended = subprocess.run(
        [*command, "--address", f"127.0.0.1:{free_port()}"], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = [match.groups() for match in LINE.finditer(ended.stdout)]
    assert [int(version) for version, *_ in rows] == list(range(15))
    assert [how for _, _, how, _ in rows] == ["whole"] + ["difference"] * 14
    received, whole = ([int(row[at].replace(",", "")) for row in rows] for at in (1, 3))
    assert all(received[step] < whole[step] / 2 for step in range(1, 15))
    found = re.search(r"mean reward: ([\d.]+) at first, ([\d.]+) at last", ended.stdout)
    assert found is not None
    assert float(found[2]) > float(found[1]) + 0.1
