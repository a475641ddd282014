"""The example as a user starts it: the same job on both backends, and through the hook, must learn the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT, ranks

SCRIPT = ROOT / "examples" / "train_gpt.py"
SMALL = ["--steps", "20", "--batch", "2", "--context", "16", "--width", "32", "--layers", "1", "--heads", "2"]
HANG_S = 80.0  # a rank that takes longer prints its stacks and ends
FLOAT_ROUNDING = 1e-3  # gradients are added in another order; 20 steps amplify the last bits


def train(metrics: Path, *arguments: str) -> list[dict[str, Any]]:
    ranks.torchrun(SCRIPT, *SMALL, *arguments, "--metrics", str(metrics), OMP_NUM_THREADS="1")
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("gloo") / "metrics.jsonl", "--backend", "gloo")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(each.split(), id=each, marks=pytest.mark.slow if "gloo" in each else ())
        for each in ("--backend commlayer", "--backend commlayer --hook", "--backend gloo --overlap")
    ],
)
def test_learns_the_same_as_on_gloo(on_gloo: list[dict[str, Any]], tmp_path: Path, arguments: list[str]) -> None:
    log = train(tmp_path / "metrics.jsonl", *arguments)
    losses = [record["loss"] for record in log[:-1]]
    assert losses == pytest.approx([record["loss"] for record in on_gloo[:-1]], abs=FLOAT_ROUNDING)
    assert losses[-1] < losses[0]
    assert log[-1]["replicas_identical"]


def test_replicas_that_drifted_apart_are_reported(tmp_path: Path) -> None:
    drift = tmp_path / "drift.py"
    drift.write_text(
        f"""
import faulthandler, sys, torch
faulthandler.dump_traceback_later({HANG_S}, exit=True)
sys.path.insert(0, {str(SCRIPT.parent)!r})
import train_gpt
digest = train_gpt.parameters_digest
def drifted(model):
    if torch.distributed.get_rank() == 1:
        next(model.parameters()).data.view(-1)[0] += 1e-3
    return digest(model)
train_gpt.parameters_digest = drifted
train_gpt.main()
""",
        encoding="utf-8",
    )
    metrics = tmp_path / "metrics.jsonl"
    ranks.torchrun(drift, *SMALL, "--backend", "gloo", "--metrics", str(metrics), OMP_NUM_THREADS="1")
    summary = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
    assert summary["replicas_identical"] is False
