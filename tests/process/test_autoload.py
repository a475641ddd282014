"""The backend is there after `import torch`, and takes gloo's place where COMMLAYER_INSTEAD_OF says so."""

import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import commlayer
import commlayer_autoload
from commlayer.frontend.group.backend import CommProcessGroup
from tests import ROOT, ranks

INSTEAD = {"COMMLAYER_INSTEAD_OF": "gloo"}
IMPORT_MS = 20.0
"""The processor time that `import torch` may take longer."""


def python(source: str, **environ: str) -> str:
    """What a fresh Python prints."""
    command = [sys.executable, "-c", source]
    environment = ranks.script_environ(**environ)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


JOB = """
import sys
import torch, torch.distributed as dist

loaded = [name for name in sys.modules if name.startswith(("commlayer.", "_cffi"))]
dist.init_process_group({backend}, store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(loaded, dist.get_backend(), type(dist.group.WORLD).__name__, tensor.tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("backend", "environ"), [("'commlayer'", {}), ("'gloo'", INSTEAD), ("None", INSTEAD)])
def test_nobody_has_to_import_commlayer(backend: str, environ: dict[str, str]) -> None:
    assert python(JOB.format(backend=backend), **environ) == "[] commlayer CommProcessGroup [1.0, 1.0, 1.0]\n"


def test_gloo_stays_gloo_without_the_variable() -> None:
    assert python(JOB.format(backend="'gloo'")) == "[] gloo ProcessGroup [1.0, 1.0, 1.0]\n"


TIME = """
import time
import torch

start = time.process_time()
import commlayer_autoload
commlayer_autoload.load()
print(1e3 * (time.process_time() - start))
"""


def test_import_of_torch_takes_little_longer() -> None:
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **INSTEAD}
    assert min(float(python(TIME, **environ)) for _ in range(3)) < IMPORT_MS


def test_commlayer_registers_itself_if_torch_loads_no_backends() -> None:
    source = f"import torch, commlayer\n{JOB.format(backend=repr('commlayer'))}"
    assert "commlayer CommProcessGroup" in python(source, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.parametrize(("found", "expected"), [(None, []), ("cuda", []), ("xpu", ["xpu"])])
def test_the_backend_is_also_that_of_the_accelerator_at_hand(
    found: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    assert commlayer_autoload._devices() == ["cpu", "cuda", *expected]


def test_torch_finds_the_backend_by_its_name() -> None:
    (entry,) = metadata.entry_points(group="torch.distributed.backends", name="commlayer")
    assert entry.load() is commlayer_autoload.load


@pytest.mark.skipif(not hasattr(dist.Backend, "_ensure_backend_registered"), reason="torch asks by name since 2.14")
def test_torch_asks_for_the_backend_by_its_name() -> None:
    source = JOB.format(backend=repr("commlayer"))
    assert "commlayer CommProcessGroup" in python(source, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


TORCHCOMMS = {
    "torchcomms/__init__.py": """
def is_backend_built(name):
    return name == "gloo"

def new_comm(*args, **kwargs):
    raise RuntimeError("torchcomms was asked")
""",
    "torchcomms/_backend_wrapper.py": "class _BackendWrapper: pass",
    "torchcomms/hooks.py": "class FlightRecorderHook: pass",
    "torchcomms-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchcomms\nVersion: 9.9\n",
}
"""A stand-in for the package: as much as torch imports."""

REFUSED = f"""
import torch.distributed as dist
try:
{textwrap.indent(JOB.format(backend="'{backend}'"), "    ")}
except (ValueError, RuntimeError) as error:
    print(error)
"""


@pytest.mark.parametrize(("backend", "environ"), [("commlayer", {}), ("cpu:commlayer", {}), ("gloo", INSTEAD)])
def test_torchcomms_is_not_asked_for_our_groups(backend: str, environ: dict[str, str], tmp_path: Path) -> None:
    for name, text in TORCHCOMMS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    source = REFUSED.replace("{backend}", backend)
    said = python(source, TORCH_DISTRIBUTED_USE_TORCHCOMMS="1", PYTHONPATH=path, **environ)
    if torch.__version__.startswith("2.11.") or hasattr(dist.distributed_c10d, "_torchcomms_handles_backend"):
        assert "CommProcessGroup [1.0, 1.0, 1.0]" in said
    else:
        assert "rank 0: TORCH_DISTRIBUTED_USE_TORCHCOMMS=1" in said
        assert "torchcomms 9.9" in said
        assert "unset the variable" in said


def is_ours(group: Any) -> bool:
    return isinstance(group, CommProcessGroup) and dist.get_backend(group) == "commlayer"


@pytest.mark.parametrize("backend", ["gloo", "GLOO", "cpu:gloo", None])
@ranks.on(2, environ=INSTEAD)
def test_unchanged_scripts_run_on_commlayer(rank: int, size: int, backend: str | None) -> None:
    for _ in range(2):
        commlayer_autoload.load()
    options = dist.ProcessGroupGloo._Options() if backend == "gloo" else None  # type: ignore[attr-defined]
    dist.init_process_group(backend, rank=rank, world_size=size, store=ranks.store(), pg_options=options)
    world: Any = dist.group.WORLD
    assert isinstance(world, CommProcessGroup)
    assert isinstance(world._gloo, dist.ProcessGroupGloo)  # beneath, gloo stays gloo
    assert dist.get_backend_config() == "cpu:commlayer" if backend == "cpu:gloo" else is_ours(world)
    assert is_ours(dist.new_group([0, 1], backend="gloo"))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"), backend_override={"tp": "gloo"})
    assert is_ours(mesh.get_group("tp"))
    sparse = torch.eye(2).to_sparse()
    dist.all_reduce(sparse)  # gloo does it
    assert sparse.to_dense().tolist() == [[2.0, 0.0], [0.0, 2.0]]
    assert dist.Backend.default_device_backend_map["cpu"] == "commlayer"
    assert dist.get_default_backend_for_device("cpu") == "commlayer"
    dist.destroy_process_group()


@ranks.on(1, environ={"COMMLAYER_INSTEAD_OF": "nccl"})
def test_another_backend_cannot_be_replaced(rank: int, size: int) -> None:
    commlayer_autoload.load()
    with pytest.raises(commlayer.ConfigError, match="COMMLAYER_INSTEAD_OF=nccl: use gloo, or nothing"):
        dist.init_process_group("gloo", rank=rank, world_size=size, store=ranks.store())


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("gloo", "commlayer"),
        ("nccl", "nccl"),
        ("commlayer", "commlayer"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:gloo", "cpu:commlayer,cuda:commlayer"),
        ("undefined", "undefined" if torch.accelerator.is_available() else "commlayer"),
    ],
)
def test_names(asked: str, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLAYER_INSTEAD_OF", " Gloo ")
    assert commlayer_autoload.instead_of(asked) == made
