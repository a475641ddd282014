"""The settings of `commlayer tune` reach a job that knows nothing of commlayer."""

import sys
from pathlib import Path

import pytest

from commlayer.tools.job.trial import run_trial
from commlayer.tools.tune.arm import Arm
from tests import ranks

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(400, 400) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    model(torch.randn(8, 400)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


OWN_HOOK = SCRIPT.replace(
    "optimizer =", "model.register_comm_hook(None, ddp_comm_hooks.default_hooks.allreduce_hook)\noptimizer =", 1
).replace("from torch import nn", "from torch import nn\nfrom torch.distributed.algorithms import ddp_comm_hooks")
NO_DDP = SCRIPT.replace("nn.parallel.DistributedDataParallel(", "(")


@pytest.mark.parametrize(("script", "takes_hook"), [(SCRIPT, True), (OWN_HOOK, False), (NO_DDP, False)])
def test_a_trial_sees_whether_settings_reach_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, takes_hook: bool
) -> None:
    (tmp_path / "train.py").write_text(script)
    for name, value in ranks.script_environ(OMP_NUM_THREADS="1").items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    found = run_trial([*command, str(tmp_path / "train.py")], environment={}, steps=1, warmup=1, timeout_s=100)
    assert [record.takes_hook for record in found.records] == [takes_hook]


def test_an_arm_changes_the_codec_and_the_overlap_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, value in ranks.script_environ(COMMLAYER_SHM="0", COMMLAYER_IFNAME="lo", OMP_NUM_THREADS="1").items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arm = Arm(codec="int8", overlap=True, bucket_mb=1.0, replaces_gloo=True)
    found = run_trial(
        [*command, str(tmp_path / "train.py")], environment=arm.environment, steps=4, warmup=2, timeout_s=100
    )
    assert found.ranks == 2
    for record in found.records:
        assert record.backend == "commlayer"
        assert record.uses_engine
        assert record.takes_hook
        assert {step.collectives for step in record.steps} == {4}  # of two buckets: weights in 8 bits, biases in 16
        sent = record.counters["payload_bytes_sent"] / 4
        # int8: 1/4; the first and the last step may begin beside sums of their neighbours, so 3 to 5 of 4 steps count.
        assert 0.18 < sent / (4 * 400 * 401 * 4) < 0.36  # 16 bits: at least 3/8
