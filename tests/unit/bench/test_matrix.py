"""The script around a matrix: its results, and its exit status."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness.driver import BenchError
from bench.harness.matrix import Claim, Figures, Matrix, Runs, machines

MACHINE = {"cores": 2, "cpu": "a cpu", "kernel": "Linux 6", "torch": "2.13"}


def figures(runs: Runs) -> Figures:
    return Figures(str(runs["good"]["value"]), "", None, runs["good"]["value"] > 1)


def matrix(folder: Path, value: float = 2.0, *, may_fail: bool = False) -> Matrix:
    def run(name: str, quick: bool) -> dict[str, Any]:
        if name == "bad":
            raise BenchError("bad: no such network")
        return {"value": value / 10 if quick else value}

    page = folder / "page.md"
    page.write_text("<!-- names:begin -->\n<!-- names:end -->\n")
    claims = [Claim("good", "a case", "4K", "figure", "> 1", figures)]
    names = frozenset(["bad"] if may_fail else [])
    return Matrix(["good", "bad"], run, claims, {"names": ",".join}, folder / "kept.json", page, names)


@pytest.mark.parametrize(
    ("arguments", "value", "may_fail", "status"),
    [("--only good", 2.0, False, 0), ("--only good", 1.0, False, 1), ("", 2.0, False, 2), ("", 2.0, True, 0)],
)
def test_runs_are_kept_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, value: float, may_fail: bool, status: int
) -> None:
    monkeypatch.setattr("sys.argv", ["matrix", *arguments.split()])
    assert matrix(tmp_path, value, may_fail=may_fail).main("") == status
    kept = json.loads((tmp_path / "kept.json").read_text())["runs"]
    bad = {} if arguments else {"bad": {"failed": "bad: no such network"}}
    assert kept == {"good": {"value": value}, **bad}
    assert (tmp_path / "page.md").read_text() == f"<!-- names:begin -->\n{','.join(kept)}\n<!-- names:end -->\n"


def test_quick_runs_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["matrix", "--only", "good", "--quick"])
    assert matrix(tmp_path).main("") == 0  # a tenth of the value, but not judged
    assert not (tmp_path / "kept.json").exists()
    assert ",".join(["good"]) not in (tmp_path / "page.md").read_text()


def test_a_table_needs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept.json").write_text(json.dumps({"schema": 1, "runs": {"good": {"value": 3}}}))
    monkeypatch.setattr("sys.argv", ["matrix", "--table"])
    assert matrix(tmp_path).main("") == 0
    assert "\ngood\n" in (tmp_path / "page.md").read_text()


def test_machines_are_named_with_all_their_commits() -> None:
    runs = {name: {"machine": {**MACHINE, "git_commit": name}} for name in ("a1", "b2")}
    assert machines({**runs, "bad": {"failed": ""}}) == "2 cores of a cpu, Linux 6, torch 2.13, commits a1, b2"
