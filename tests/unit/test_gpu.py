"""`make gpu` by itself: its report, its exit status, and its bundle. The checks run on a fake in test_cuda.py."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.gpu import bundle
from tests.gpu import suite as gpu
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
    monkeypatch.setattr(
        ranks, "run_job", lambda *args, **options: asked.append((*args[2:], options["backend"], options["environ"]))
    )
    monkeypatch.setattr(ranks, "run", lambda *args, **_: asked.append(args[2:]))
    expected: list[tuple[Any, ...]] = []
    for part, name, mode, body in list(gpu.jobs()):
        body()
        if part == "check":
            expected.append((name, {**gpu.MODES, **gpu.NARROW}[mode]))
        elif part == "figure":
            expected.append((name, *(("gloo", {}) if mode == "gloo" else ("commlayer", gpu.MODES[mode]))))
        else:
            expected.append((name, mode))
    assert asked == expected


def test_the_dead_rank_of_killed_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [ranks.Outcome(result=True, exit_code=0), ranks.Outcome(error="died with exit code -9", exit_code=-9)]
    monkeypatch.setattr(ranks, "outcomes", lambda *_, **__: ended)
    with pytest.raises(ranks.RanksError, match="rank 1: died"):
        gpu.run_check("order", {})
    assert gpu.run_check("killed", {}) == "streams wait"


def test_the_command_runs_checks_in_processes_of_their_own(tmp_path: Path) -> None:
    """On a fake: the way from the command to the ranks, which import the checks by name."""
    command = [sys.executable, "-m", "tests.gpu", "--fake", "--only", "rooted", "--report", str(tmp_path / "report")]
    ended = subprocess.run(command, env=ranks.script_environ(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "report").read_text())["rows"]
    assert [(row["mode"], row["values"]) for row in rows] == [
        ("blocking", "wait() blocks"),
        ("streams", "streams wait"),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 2
    assert "no GPU" in capsys.readouterr().out


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """The folder of an unpacked bundle; its wheels have a file each."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, module in (
        ("commlayer-1-cp310-abi3-linux_x86_64", "ours"),
        (f"cffi-2-cp3{sys.version_info[1]}-cp3{sys.version_info[1]}-linux_x86_64", "cffi_of_the_bundle"),
        ("cffi-2-cp39-cp39-linux_x86_64", "cffi_of_another_python"),
        ("pycparser-3-py3-none-any", "parser"),
    ):
        with zipfile.ZipFile(wheels / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{module}.py", "")
    target = tmp_path / "out" / "gpu-bundle.tar.gz"
    ours = next(wheels.glob("commlayer-*"))
    bundle.pack(ours.rename(tmp_path / ours.name), target, wheels)
    with tarfile.open(target) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "gpu-bundle"


def run(packed: Path, python: str) -> tuple[int, str]:
    """Runs it as the user of another machine, with another Python."""
    environ = {"PYTHON": python, "PATH": os.environ["PATH"]}
    ended = subprocess.run(
        ["sh", f"{packed.name}/run"], cwd=packed.parent, env=environ, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def absent(folder: Path, *names: str) -> str:
    """This Python, without some modules, as a program."""
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text("raise ModuleNotFoundError(__name__, name=__name__)")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_bundle_needs_nothing_but_torch(packed: Path, tmp_path: Path) -> None:
    """It comes to the question whether there is a GPU, which all imports precede. Nothing is installed."""
    python = absent(
        tmp_path / "bare", "pytest", "hypothesis", "typer", "rich", "scapy", "greenlet", "yaml", "zmq", "pip"
    )
    assert run(packed, python) == (2, f"no GPU, or none that torch {torch.__version__} can use: nothing was checked\n")
    assert {path.name for path in (packed / "packages").iterdir()} == {"ours.py", "cffi_of_the_bundle.py", "parser.py"}


def test_the_bundle_says_what_is_missing(packed: Path, tmp_path: Path) -> None:
    code, said = run(packed, absent(tmp_path / "no_torch", "torch"))
    assert (code, "has no torch: PYTHON=" in said) == (2, True)
    code, said = run(packed, absent(tmp_path / "no_numpy", "numpy"))
    assert f"no wheel of numpy for {tmp_path}/no_numpy/python" in said
    assert code == 2


def test_a_bundle_has_a_limit(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 10)
    with pytest.raises(SystemExit, match="are more than 10"):
        bundle.pack(next(packed.glob("wheels/commlayer*")), tmp_path / "again.tar.gz", packed / "wheels")
