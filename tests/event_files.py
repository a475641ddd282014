"""TensorBoard's event files: read by the package tensorboard where it is installed, else written and read by a stand-in
for torch's SummaryWriter, so that the tests do their work everywhere."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

IS_REAL = importlib.util.find_spec("tensorboard") is not None


class Scalar(NamedTuple):
    value: float
    step: int
    walltime: float


class Writer:
    """A SummaryWriter that writes a line of JSON for each scalar."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, "events.jsonl")

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, value, step, walltime]) + "\n")

    def flush(self) -> None:
        pass


def provide() -> None:
    """Puts the stand-in into the place of `torch.utils.tensorboard` if the package tensorboard is missing."""
    if not IS_REAL:
        module: Any = ModuleType("torch.utils.tensorboard")
        module.SummaryWriter = Writer
        sys.modules["torch.utils.tensorboard"] = module


def read(folder: Path) -> dict[str, list[Scalar]]:
    """The scalars of a folder, by name."""
    found: dict[str, list[Scalar]] = {}
    if not IS_REAL:
        for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
            name, *rest = json.loads(line)
            found.setdefault(name, []).append(Scalar(*rest))
        return found
    accumulator: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        found[name] = [Scalar(scalar.value, scalar.step, scalar.wall_time) for scalar in events.Scalars(name)]
    return found
