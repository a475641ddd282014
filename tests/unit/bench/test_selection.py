from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

from commlayer.tools import cli
from commlayer.tools.bench import selection
from commlayer.tools.bench.codec import gaussian
from commlayer.transport import kernels

RUNNER = CliRunner()
LEVELS = kernels.kernel_levels()


def bench(*arguments: str) -> Any:
    return RUNNER.invoke(cli.app, ["bench", "select", *arguments])


def test_every_level_and_kind_of_data_has_a_row(tmp_path: Path) -> None:
    path, threads = tmp_path / "select.json", torch.get_num_threads()
    result = bench("--sizes", "4K", "--rounds", "2", "--share", "0.1", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["results"]
    assert [(row["data"], row["level"]) for row in rows] == [
        (data, level) for data in selection.DATA for level in LEVELS
    ]
    assert all(row["of_two_reads"] > 0 and row["beside_torch"] > 0 and row["gb_s"] > 0 for row in rows)
    lines = [line.split()[0] for line in result.output.splitlines() if line[:1] == " "]
    assert lines == LEVELS * 2
    assert (kernels.kernel_levels(), torch.get_num_threads()) == (LEVELS, threads)


def test_all_calls_do_their_work() -> None:
    values = gaussian(1000)
    calls = selection.calls_of(values, 10)
    assert list(calls) == [selection.READ, selection.TORCH, *LEVELS]
    taken: Any = calls[selection.TORCH]()
    assert sorted(taken.indices.tolist()) == sorted(np.argsort(-np.abs(values))[:10].tolist())
    assert calls[selection.READ]() is None
    for level in LEVELS:
        calls[level]()
