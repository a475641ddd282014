import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commlayer.errors import ConfigError
from commlayer.tools.top.scalars import Scalars
from tests import event_files
from tests.unit.top.test_table import NO_STEPS, job, sample


class Writer:
    """torch's SummaryWriter."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.found: dict[str, tuple[float, int, float]] = {}

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        self.found[name] = value, step, walltime

    def flush(self) -> None:
        pass


@pytest.fixture
def scalars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return Scalars(tmp_path)


def test_scalars_of_the_job_and_of_each_rank_at_its_step(scalars: Any) -> None:
    scalars.write(job(sample(0, lost=10), sample(1, **NO_STEPS), sample(64)))
    found = scalars._writer.found
    assert found["job/exposed_step_s"] == (0.02, 12345678, 1e9)
    assert found["loss/rank 00"][0] == 0.01
    assert found["sent_bytes_s/rank 01"][0] == 117_000_000
    assert "exposed_step_s/rank 01" not in found
    assert not [name for name in found if name.endswith("64")]


def test_the_files_have_the_scalars_at_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", sys.modules.get("torch.utils.tensorboard"))
    sys.modules.pop("torch.utils.tensorboard")
    event_files.provide()
    scalars = Scalars(tmp_path)
    scalars.write(job(sample(0, lost=10, step=7)))
    scalars.write(job(sample(0, lost=20, step=8)))
    found = event_files.read(tmp_path)
    assert [(scalar.step, scalar.walltime) for scalar in found["job/step_s"]] == [(7, 1e9), (8, 1e9)]
    assert [round(scalar.value, 6) for scalar in found["loss/rank 00"]] == [0.01, 0.02]
    assert {name.partition("/")[0] for name in found} == {"job", "exposed_step_s", "sent_bytes_s", "loss"}


def test_nothing_before_the_first_step(scalars: Any) -> None:
    scalars.write(job(sample(0, step=None)))
    assert scalars._writer.found == {}


def test_without_tensorboard_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        Scalars(tmp_path)
