"""torch.distributed.checkpoint: the shards that some ranks save are loaded by others."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tests.process.compat.gloo import same_as_gloo


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _save(rank: int, size: int, folder: str) -> Any:
    model, optimizer = _model()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    folder = str(Path(folder, dist.get_backend()))
    dcp.save(states, checkpoint_id=folder)
    saved = dcp.async_save(states, checkpoint_id=f"{folder}-async")
    assert saved is not None
    saved.result()  # type: ignore[union-attr]
    return [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]


def _load(rank: int, size: int, folder: str) -> Any:
    torch.manual_seed(99)
    model, optimizer = _model()
    states: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=str(Path(folder, dist.get_backend())))
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]


def test_saved_by_two_loaded_by_three(tmp_path: Path) -> None:
    saved = same_as_gloo(_save, 2, str(tmp_path))
    loaded = same_as_gloo(_load, 3, str(tmp_path))
    assert loaded == [saved[0]] * 3
