import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commlayer.tools.bench import launch
from commlayer.tools.bench.spec import BackendSpec, Spec


def test_ranks_import_the_package_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []

    @contextlib.contextmanager
    def process(_command: list[str], environment: dict[str, str], _log: Any, _table: Any) -> Iterator[Any]:
        environments.append(environment)
        yield SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(launch, "_process", process)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert launch.launch(Spec((BackendSpec("gloo"),), (4096,)), 2) == 0
    assert [variables["RANK"] for variables in environments] == ["0", "1"]
    for variables in environments:
        first, *others = variables["PYTHONPATH"].split(os.pathsep)
        assert Path(first, "commlayer/__init__.py").exists()
        assert others == ["elsewhere"]
