"""The file of settings changes the DistributedDataParallel models of a script that knows nothing of commlayer."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import commlayer
import commlayer_autoload
from tests import ranks

pytestmark = pytest.mark.timeout(300)  # a busy machine takes a minute to start torchrun

SCRIPT = """
import os
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.parallel.DistributedDataParallel(nn.Linear(400, 300))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 400)).square().mean().backward()
    optimizer.step()
sums = torch.cat([each.detach().double().flatten() for each in model.parameters()]).abs().sum()
print(f"sum {sums.item():.9f}", flush=True)
dist.destroy_process_group()
"""


def torchrun(folder: Path) -> tuple[set[float], str]:
    """The sums of the parameters on both ranks of the script, started in a folder, and what the ranks log."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    environ = ranks.script_environ(COMMLAYER_IFNAME="lo", OMP_NUM_THREADS="1")
    ended = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    return {float(number) for number in re.findall(r"sum ([\d.]+)", ended.stdout)}, ended.stderr


def sent_kib(log: str) -> float:
    """The bytes that the ranks sent, as their logs say."""
    found = re.findall(r"network: ([\d.]+) (KiB|MiB) sent", log)
    assert len(found) == 2
    return sum(float(number) * {"KiB": 1, "MiB": 1024}[unit] for number, unit in found)


def test_a_file_changes_the_codec_of_an_unchanged_job(tmp_path: Path) -> None:
    file = tmp_path / "commlayer.toml"
    text = "[process]\nshm = false\nlog = 'info'\n[ddp]\nhook = true\n[policy]\ncodec = '{}'\n"
    file.write_text(text.format("none"))
    file.chmod(0o644)
    (exact,), log = torchrun(tmp_path)
    assert f"settings come from the file {file}, too" in log
    assert "Linear is averaged by commlayer's hook, as the settings ask: policy defaults" in log
    file.write_text(text.format("int8"))
    (rounded,), short_log = torchrun(tmp_path)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-3)
    assert short_log.count("policy codec='int8'; gradients are not exact; `commlayer config` shows where") == 1
    assert sent_kib(short_log) < 0.4 * sent_kib(log)


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def made(**arguments: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20)), **arguments)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ask(**environ: str) -> None:
    os.environ.update({f"COMMLAYER_{name}": value for name, value in environ.items()})
    commlayer_autoload.load()


def hooks(model: DistributedDataParallel) -> list[str]:
    return [getattr(hook, "__qualname__", str(hook)) for hook, _ in model._comm_hooks]


@ranks.on(2, ranks.run_gloo)
def test_the_overlap_keeps_results(rank: int, size: int) -> None:
    expected = train(*made(), rank)
    ask(DDP_OVERLAP="1")
    model, optimizer = made()
    with torch.no_grad():
        model(torch.zeros(1, 40))
    assert not model._comm_hooks  # the script may still register its own
    found = train(model, optimizer, rank)
    assert hooks(model) == ["DdpOverlap.__init__.<locals>.<lambda>"]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


class Accelerated(torch.optim.Optimizer):
    """An optimizer in another one, as Accelerate has them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


def averaged(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=2, warmup_steps=0))


@pytest.mark.parametrize("wrap", [Accelerated, averaged])
@ranks.on(2, ranks.run_gloo)
def test_the_overlap_takes_the_optimizer_in_a_wrapper(rank: int, size: int, wrap: Any) -> None:
    model, optimizer = made()
    expected = train(model, wrap(optimizer), rank)
    ask(DDP_OVERLAP="1")
    model, optimizer = made()
    found = train(model, wrap(optimizer), rank)
    assert hooks(model) == ["DdpOverlap.__init__.<locals>.<lambda>"]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@ranks.on(2, ranks.run_gloo)
def test_an_optimizer_of_a_part_of_the_parameters_is_no_wrapper(rank: int, size: int) -> None:
    ask(DDP_OVERLAP="1")
    model = made()[0]
    kept = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    with pytest.raises(commlayer.ConfigError, match=r"the job has .*ZeroRedundancyOptimizer.*; make one"):
        train(model, kept, rank)
    dist.barrier()


@ranks.on(2, ranks.run_gloo)
def test_the_scripts_code_has_precedence(rank: int, size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    ask(DDP_HOOK="1", DDP_BUCKET_MB="3", POLICY_CODEC="int8")
    model, optimizer = made(bucket_cap_mb=7)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model, optimizer, rank)
    assert hooks(model) == ["allreduce_hook"]
    assert made(bucket_cap_mb=None)[0].bucket_bytes_cap == 3 << 20  # nothing is given
    assert model._comm_hooks[0][0] is default_hooks.allreduce_hook
    assert model.bucket_bytes_cap == 7 << 20
    model, optimizer = made()
    train(model, optimizer, rank)
    assert model._comm_hooks[0][0] is commlayer.allreduce_hook
    state: Any = model._comm_hooks[0][1]
    assert state.policy == commlayer.Policy(codec="int8")
    assert model.bucket_bytes_cap == 3 << 20
    assert not model._forward_pre_hooks
    assert commlayer.HookState(commlayer.Policy()).policy == commlayer.Policy()
    assert commlayer.HookState().policy == commlayer.Policy(codec="int8")


@ranks.on(2, ranks.run_gloo)
def test_overlap_that_is_impossible_is_an_error(rank: int, size: int) -> None:
    ask(DDP_OVERLAP="1")
    model, _ = made(gradient_as_bucket_view=False)
    with pytest.raises(commlayer.ConfigError, match=r"^\[ddp\] overlap = true: .*; or set overlap = false"):
        model(torch.zeros(1, 40))
    model = DistributedDataParallel(nn.Linear(40, 30))
    with pytest.raises(commlayer.ConfigError, match=r"needs the one optimizer of Linear, and .* the job has none"):
        model(torch.zeros(1, 40))
    dist.barrier()


@ranks.on(2, ranks.run_gloo)
def test_nothing_changes_where_commlayer_is_disabled(rank: int, size: int) -> None:
    ask(DDP_HOOK="1", DDP_BUCKET_MB="3", DISABLE="1")
    model, optimizer = made()
    train(model, optimizer, rank)
    assert not model._comm_hooks
    assert model.bucket_bytes_cap == 25 << 20


@ranks.on(2)
def test_ranks_with_other_settings_of_models_are_told(rank: int, size: int) -> None:
    os.environ["COMMLAYER_POLICY_CODEC"] = ["int8", ""][rank]
    told = (
        r"\[policy\] \(commlayer.toml or COMMLAYER_POLICY_\*\) differs within .*: codec='int8' on rank.* 0.*not set on"
    )
    with pytest.raises(commlayer.ConfigError, match=told):
        ranks.init(rank, size)


@ranks.on(1)
def test_a_file_takes_gloos_place(rank: int, size: int, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[process]\ninstead_of = 'gloo'\n")
    ask(CONFIG=str(path))
    dist.init_process_group("gloo", rank=rank, world_size=size, store=ranks.store())
    assert dist.get_backend() == "commlayer"
    dist.destroy_process_group()
