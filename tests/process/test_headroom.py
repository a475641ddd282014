"""`commlayer headroom` on a real job of two ranks, which no line of it is changed for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commlayer.tools.job.trial import TooFewStepsError, run_trial
from tests import ROOT, ranks

JOB = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

world = sys.argv[1] == "world"
if world:
    dist.init_process_group("gloo")
model = torch.nn.Linear(1000, 1000)
model = DistributedDataParallel(model) if world else model
other = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[2])):
    for part in range(2):  # accumulation
        model(torch.ones(4, 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    other.step()
    if world:
        one = torch.ones(1)
        dist.all_reduce(one)
        with open(f"{sys.argv[0]}.{dist.get_rank()}", "a") as out:
            print(int(one), end="", file=out)
        losses = [None, None]
        dist.all_gather_object(losses, {"loss": step})
        assert losses == [{"loss": step}] * 2
        time.sleep(0.005)
assert not world, "the trial should have ended the job"
"""

SMALL = ("--steps", "2", "--rounds", "2", "--warmup", "2", "--least", "0")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def headroom(*words: str) -> tuple[int, dict[str, Any], str]:
    """Status, JSON and standard error of the command."""
    command = [sys.executable, "-m", "commlayer", "headroom", "--json", "-", *words]
    environment = ranks.script_environ(OMP_NUM_THREADS="1")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False, cwd=ROOT)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout), ended.stderr


@pytest.mark.slow
def test_headroom_of_a_job_under_torchrun(script: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    status, found, told = headroom(*SMALL, "--", *torchrun, str(script), "world", "1000")
    assert status == 3, told
    assert (found["ranks"], found["backend"]) == (2, "gloo")
    assert [len(found["steps"][name]["steps_s"]) for name in ("as_is", "short", "left_out")] == [4, 4, 4]
    assert all(step["median_s"] > 0.005 for step in found["steps"].values())
    engine = found["engine"]
    assert engine["operations"] >= 2  # DDP's bucket or buckets, sizes and objects
    assert engine["nbytes"] > 2 * 4_000_000
    assert 0 < engine["transfer_s"] < engine["step"]["median_s"]
    assert "Traceback" not in told
    # The sum is called after a step, in the phase of the next one: one to warm up, then blocks of three.
    in_turns = "2" + ("222" + "111" + "111") * 2
    on_commlayer = "2" + "2" * 5
    for rank in range(2):
        assert script.with_name(f"{script.name}.{rank}").read_text() == in_turns + on_commlayer


def test_a_job_that_ends_early_says_so(script: Path) -> None:
    """Only the first optimizer counts."""
    with pytest.raises(
        TooFewStepsError, match=r"after 4 optimizer steps on rank 0; the trial needs 6 \(1 to warm up\)"
    ):
        run_trial(
            [sys.executable, str(script), "alone", "4"],
            environment=ranks.script_environ(),
            steps=5,
            warmup=1,
            timeout_s=110,
        )
