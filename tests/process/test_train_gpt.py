"""The example as a user starts it: the same job on both backends, and through the hook, must learn the same."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from commlayer.tools.bench.launch import free_port
from tests import ROOT, ranks

SCRIPT = ROOT / "examples" / "train_gpt.py"
SMALL = ["--steps", "20", "--batch", "2", "--context", "16", "--width", "32", "--layers", "1", "--heads", "2"]
FLOAT_ROUNDING = 1e-3  # gradients are added in another order; 20 steps amplify the last bits


def train(metrics: Path, *arguments: str) -> list[dict[str, Any]]:
    ranks.torchrun(SCRIPT, *SMALL, *arguments, "--metrics", str(metrics), OMP_NUM_THREADS="1")
    return read(metrics)


def read(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def _main(rank: int, size: int, metrics: Path, port: int, drifts: bool) -> None:
    """The example on gloo, without torchrun; its last rank has other weights in the end if it `drifts`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.path.insert(0, str(SCRIPT.parent))
    example: Any = importlib.import_module(SCRIPT.stem)
    digest = example.parameters_digest

    def drifted(model: Any) -> Any:
        if dist.get_rank() == size - 1:
            next(model.parameters()).data.view(-1)[0] += 1e-3
        return digest(model)

    if drifts:
        example.parameters_digest = drifted
    sys.argv = [str(SCRIPT), *SMALL, "--backend", "gloo", "--metrics", str(metrics)]
    example.main()


def train_on_gloo(metrics: Path, *, drifts: bool) -> list[dict[str, Any]]:
    ranks.run(_main, 2, metrics, free_port(), drifts)
    return read(metrics)


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train_on_gloo(tmp_path_factory.mktemp("gloo") / "metrics.jsonl", drifts=False)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(options.split(), id=options, marks=pytest.mark.slow if "gloo" in options else ())
        for options in ("--backend commlayer", "--backend commlayer --hook", "--backend gloo --overlap")
    ],
)
def test_learns_the_same_as_on_gloo(on_gloo: list[dict[str, Any]], tmp_path: Path, arguments: list[str]) -> None:
    log = train(tmp_path / "metrics.jsonl", *arguments)
    losses = [record["loss"] for record in log[:-1]]
    assert losses == pytest.approx([record["loss"] for record in on_gloo[:-1]], abs=FLOAT_ROUNDING)
    assert losses[-1] < losses[0]
    assert log[-1]["replicas_identical"]


def test_replicas_that_drifted_apart_are_reported(tmp_path: Path) -> None:
    summary = train_on_gloo(tmp_path / "metrics.jsonl", drifts=True)[-1]
    assert summary["replicas_identical"] is False
