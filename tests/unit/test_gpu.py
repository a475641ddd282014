"""`make gpu` by itself: its report, its exit status, and its bundle. The checks run on a fake in test_cuda.py."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.gpu import __main__ as gpu
from tests.gpu import bundle
from tests.gpu.figures import FIGURES


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu.Report:
    monkeypatch.setattr(gpu, "about", lambda: {"device": "1 x none"})
    return gpu.Report(tmp_path / "gpu-report.json", 600.0)


def fail() -> None:
    raise ranks.RanksError("rank 1: AssertionError")


def test_the_report_has_a_row_for_each(report: gpu.Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.run("check", "order", "blocking", lambda: "wait() blocks")
    report.run("check", "drains", "streams", fail)
    report.run("fact", "item", "none", fail)  # a call that blocks is a fact, not a failure
    report._limit_s = 0.0
    report.run("figure", "ddp", "gloo", dict)
    said = json.loads((tmp_path / "gpu-report.json").read_text())
    assert said["device"] == "1 x none"
    assert [row["result"] for row in said["rows"]] == ["ok", "FAILED", "FAILED", "not run: the time was up"]
    assert said["rows"][1]["error"] == "rank 1: AssertionError"
    assert report.failed == 1
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_every_check_runs_blocking_and_with_streams_and_every_name_is_known() -> None:
    rows = [(part, name, mode) for part, name, mode, _ in gpu.jobs()]
    assert len(set(rows)) == len(rows)
    for name in gpu.ALL:
        assert {"blocking", "streams"} <= {mode for part, check, mode in rows if (part, check) == ("check", name)}
    assert {name for part, name, _ in rows if part == "figure"} == set(FIGURES)


def test_each_job_runs_its_own_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bodies are made in loops."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(gpu, "run_check", lambda name, environ: asked.append((name, environ)))
    monkeypatch.setattr(ranks, "run_job", lambda *args, **options: asked.append((*args[2:], options["backend"])))
    monkeypatch.setattr(ranks, "run", lambda *args, **_: asked.append(args[2:]))
    expected: list[tuple[Any, ...]] = []
    for part, name, mode, body in list(gpu.jobs()):
        body()
        if part == "check":
            launch = {**gpu.STREAMS, "CUDA_LAUNCH_BLOCKING": "1"}
            expected.append((name, launch if mode == "launch blocking" else gpu.MODES[mode]))
        else:
            expected.append((name, mode))
    assert asked == expected


def test_the_dead_rank_of_killed_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [ranks.Outcome(result=True, exit_code=0), ranks.Outcome(error="died with exit code -9", exit_code=-9)]
    monkeypatch.setattr(ranks, "outcomes", lambda *_, **__: ended)
    with pytest.raises(ranks.RanksError, match="rank 1: died"):
        gpu.run_check("order", {})
    assert gpu.run_check("killed", {}) == "streams wait"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 2
    assert "no GPU" in capsys.readouterr().out


def test_the_bundle_has_what_the_checks_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, wheels = tmp_path / "commlayer-1-cp310-abi3.whl", tmp_path / "wheels"
    wheels.mkdir()
    for path in (wheel, wheels / "cffi-1.whl"):
        path.write_bytes(b"x" * 1000)
    target = tmp_path / "out" / "gpu-bundle.tar.gz"
    bundle.pack(wheel, target, wheels)
    with tarfile.open(target) as archive:
        names = {name.removeprefix("gpu-bundle/") for name in archive.getnames()}
        assert archive.extractfile("gpu-bundle/run").read().startswith(b"#!/bin/sh\n")  # type: ignore[union-attr]
    assert {"run", f"wheels/{wheel.name}", "wheels/cffi-1.whl", "tests/ranks.py", "tests/gpu/__main__.py"} <= names
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 10)
    with pytest.raises(SystemExit, match="are more than 10"):
        bundle.pack(wheel, target, wheels)
