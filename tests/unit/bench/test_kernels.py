import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import kernels as bench
from commlayer.plans.codec import CODECS
from commlayer.transport import kernels

LEVELS = kernels.kernel_levels()


def rows_of(path: Path, *words: str) -> Any:
    bench.main([*words, "--json", str(path)])
    return json.loads(path.read_text())["results"]


def test_every_codec_and_level_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cores = os.sched_getaffinity(0)
    found = rows_of(tmp_path / "codec.json", "--only", "codec", "--sizes", "4K", "1K", "--rounds", "2")
    expected = [(name, level, size) for size in (4096, 1024) for name in CODECS for level in LEVELS]
    rows = [row for row in found["codec"] if row["codec"] != bench.MEMCPY]
    assert [(row["codec"], row["level"], row["size_bytes"]) for row in rows] == expected
    assert len(found["codec"]) == len(expected) + 2
    assert found["select"] == []
    for row in rows:
        assert all(row[operation]["gb_s"] > 0 and row[operation]["of_memcpy"] > 0 for operation in bench.OPERATIONS)
        assert row["bytes_per_value"] == CODECS[row["codec"]].block_bytes / CODECS[row["codec"]].block_values
        assert 0 < row["gaussian"]["nmse"] < 1
        assert 0 < row["heavy_tailed"]["cosine"] < 1
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines() if line[:1] == " "]
    assert [(line[0], line[1]) for line in lines] == [(name, level) for name, level, _ in expected]
    assert "# 4K: memcpy " in shown
    assert (os.sched_getaffinity(0), kernels.kernel_levels()) == (cores, LEVELS)


def test_chosen_codecs_and_levels_only(tmp_path: Path) -> None:
    words = "--only codec --sizes 1K --rounds 1 --codecs int8 f16 --levels scalar"
    rows = rows_of(tmp_path / "codec.json", *words.split())["codec"]
    assert [(row["codec"], row["level"]) for row in rows[1:]] == [("int8", "scalar"), ("f16", "scalar")]


def test_a_call_is_timed() -> None:
    def burn() -> None:
        end = time.thread_time() + 0.002
        while time.thread_time() < end:
            pass

    assert bench.seconds_of(burn, 0.01) == pytest.approx(0.002, rel=0.5)


def test_rates_are_bytes_of_float32_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {("encode", 256): 3e-6, ("decode", 256): 2e-6, ("decode_add", 256): 5e-6, ("copy", 256): 1.5e-6}

    monkeypatch.setattr(bench.Arrays, "call", lambda _self, _name, operation, count: (operation, count))
    monkeypatch.setattr(bench, "seconds_of", lambda call, *_: 1e-6 + seconds.get(call, 0))  # 1 us is the call itself
    memcpy, row = bench.codec_rows(1024, ("int8",), ("scalar",), 3)
    assert memcpy["copy"]["gb_s"] == pytest.approx(1.024 / 1.5)
    assert [row[name]["gb_s"] for name in bench.OPERATIONS] == pytest.approx([1.024 / 3, 1.024 / 2, 1.024 / 5])
    assert [row[name]["of_memcpy"] for name in bench.OPERATIONS] == pytest.approx([0.5, 0.75, 0.3])
    assert "    0.34      50    0.51      75    0.20      30" in bench.codec_table([memcpy, row])[-1]


def test_errors_are_those_of_the_values() -> None:
    errors = bench.errors_of(CODECS["bf16"], np.array([1 + 2.0**-9, -2], np.float32))  # the first is rounded to 1
    assert errors["nmse"] == pytest.approx(2.0**-18 / 5, rel=0.01)
    assert errors["cosine"] == pytest.approx(1, abs=1e-6)
    tails = bench.heavy_tailed(1 << 14)
    assert np.abs(tails).max() > 3 * np.abs(bench.gaussian(1 << 14)).max()


def test_every_level_and_kind_of_data_has_a_selection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    words = "--only select --sizes 4K --rounds 2 --share 0.1"
    rows = rows_of(tmp_path / "select.json", *words.split())["select"]
    assert [(row["data"], row["level"]) for row in rows] == [(data, level) for data in bench.DATA for level in LEVELS]
    assert all(row["of_two_reads"] > 0 and row["beside_torch"] > 0 and row["gb_s"] > 0 for row in rows)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1] == " "] == LEVELS * 2
    assert (kernels.kernel_levels(), torch.get_num_threads()) == (LEVELS, threads)


def test_all_calls_do_their_work() -> None:
    values = bench.gaussian(1000)
    calls = bench.select_calls(values, 10)
    assert list(calls) == [bench.READ, bench.TORCH, *LEVELS]
    taken: Any = calls[bench.TORCH]()
    assert sorted(taken.indices.tolist()) == sorted(np.argsort(-np.abs(values))[:10].tolist())
    assert calls[bench.READ]() is None
    for level in LEVELS:
        calls[level]()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--codecs int8 int7", "int7"),
        ("--levels sse9", "sse9"),
        ("--sizes 0", "0: use a multiple of 4 bytes"),
        ("--sizes 6", "6: use a multiple of 4 bytes"),
        ("--sizes 4Q", "4Q"),
        ("--share 0", "0: use above 0"),
        ("--share 0.6", "0.6: use above 0, and at most 0.5"),
    ],
)
def test_wrong_options_are_named_before_anything_is_measured(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(words.split())
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
