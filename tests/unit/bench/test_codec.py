from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from commlayer.plans.codec import CODECS
from commlayer.tools import cli
from commlayer.tools.bench import codec
from commlayer.transport import kernels

RUNNER = CliRunner()
LEVELS = kernels.kernel_levels()


def bench(*arguments: str) -> Any:
    return RUNNER.invoke(cli.app, ["bench", "codec", *arguments])


def test_every_codec_and_level_has_a_row(tmp_path: Path) -> None:
    path, cores = tmp_path / "codec.json", os.sched_getaffinity(0)
    result = bench("--sizes", "4K,1K", "--rounds", "2", "--json", str(path))
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    expected = [(name, level, size) for size in (4096, 1024) for name in CODECS for level in LEVELS]
    rows = [row for row in content["results"] if row["codec"] != codec.MEMCPY]
    assert [(row["codec"], row["level"], row["size_bytes"]) for row in rows] == expected
    assert len(content["results"]) == len(expected) + 2
    for row in rows:
        assert all(row[each]["gb_s"] > 0 and row[each]["of_memcpy"] > 0 for each in codec.OPERATIONS)
        assert row["bytes_per_value"] == CODECS[row["codec"]].block_bytes / CODECS[row["codec"]].block_values
        assert 0 < row["gaussian"]["nmse"] < 1
        assert 0 < row["heavy_tailed"]["cosine"] < 1
    lines = [line.split() for line in result.output.splitlines() if line[:1] == " "]
    assert [(line[0], line[1]) for line in lines] == [(name, level) for name, level, _ in expected]
    assert "# 4K: memcpy " in result.output
    assert (os.sched_getaffinity(0), kernels.kernel_levels()) == (cores, LEVELS)


def test_chosen_codecs_and_levels_only() -> None:
    result = bench("--sizes", "1K", "--rounds", "1", "--codecs", "int8,f16", "--levels", "scalar")
    lines = [line.split()[:2] for line in result.output.splitlines() if line[:1] == " "]
    assert lines == [["int8", "scalar"], ["f16", "scalar"]]


def test_a_call_is_timed() -> None:
    def burn() -> None:
        end = time.thread_time() + 0.002
        while time.thread_time() < end:
            pass

    assert codec.seconds_of(burn, 0.01) == pytest.approx(0.002, rel=0.5)


def test_rates_are_bytes_of_float32_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {("encode", 256): 3e-6, ("decode", 256): 2e-6, ("decode_add", 256): 5e-6, ("copy", 256): 1.5e-6}

    monkeypatch.setattr(codec.Arrays, "call", lambda _self, _name, operation, count: (operation, count))
    monkeypatch.setattr(codec, "seconds_of", lambda call, *_: 1e-6 + seconds.get(call, 0))  # 1 us is the call itself
    spec = codec.CodecSpec((1024,), ("int8",), ("scalar",), rounds=3)
    memcpy, row = codec.rows(spec, 1024)
    assert memcpy["copy"]["gb_s"] == pytest.approx(1.024 / 1.5)
    assert [row[each]["gb_s"] for each in codec.OPERATIONS] == pytest.approx([1.024 / 3, 1.024 / 2, 1.024 / 5])
    assert [row[each]["of_memcpy"] for each in codec.OPERATIONS] == pytest.approx([0.5, 0.75, 0.3])
    assert "    0.34      50    0.51      75    0.20      30" in codec.table(1024, [memcpy, row])[-1]


def test_errors_are_those_of_the_values() -> None:
    errors = codec.errors_of(CODECS["bf16"], np.array([1 + 2.0**-9, -2], np.float32))  # the first is rounded to 1
    assert errors["nmse"] == pytest.approx(2.0**-18 / 5, rel=0.01)
    assert errors["cosine"] == pytest.approx(1, abs=1e-6)
    tails = codec.heavy_tailed(1 << 14)
    assert np.abs(tails).max() > 3 * np.abs(codec.gaussian(1 << 14)).max()
