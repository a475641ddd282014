"""The examples of hosts are complete, and a difference in their losses is found. `make hosts` runs them."""

import json
import re
import subprocess
from importlib import metadata
from typing import Any

import pytest

from examples.hosts import compare
from tests import ROOT
from tests.documents import table

LINES = 60
ROLLOUTS = {"vllm", "verl"}
"""They train nothing, so that there is no loss to compare: `make rollouts` runs their tests."""


def test_every_host_has_its_files() -> None:
    names = set(compare.HOSTS)
    hosts = ROOT / "examples" / "hosts"
    assert {path.name.removesuffix("_job.py") for path in hosts.glob("*_job.py")} == names
    assert {path.stem for path in (ROOT / "requirements" / "hosts").glob("*.txt")} == names | ROLLOUTS
    in_makefile = re.search(r"^HOSTS \?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert in_makefile is not None
    assert set(in_makefile[1].split()) == names
    for path in hosts.glob("*_job.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES, path.name
    assert {row[0] for row in table("trainers.md", "Tried")[1:]} == {f"{name}_job.py" for name in names}


class Runs:
    """Stands for the runs of an example: gloo, by name, by variable."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)
        self.commands: list[list[str]] = []
        self.environs: list[dict[str, str]] = []

    def __call__(self, command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.environs.append(env)
        backend, losses, code = self.results.pop(0)
        said = f"noise\n{json.dumps({'backend': backend, 'losses': losses})}\n"
        return subprocess.CompletedProcess(command, code, said, "why")


GLOO, OURS = ("gloo", [2.0, 1.0], 0), ("commlayer", [2.0, 1.0], 0)


@pytest.fixture(autouse=True)
def _version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "1.2")


def test_equal_losses_make_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(GLOO, OURS, OURS)
    monkeypatch.setattr(subprocess, "run", runs)
    row = compare.compare("deepspeed")
    assert row == "| `deepspeed_job.py` | deepspeed 1.2 | 2.000000 | 1.000000 | bit by bit |"
    assert [command[-1] == "commlayer" for command in runs.commands] == [False, True, False]
    assert ["COMMLAYER_INSTEAD_OF" in environ for environ in runs.environs] == [False, False, True]
    assert all(environ["DS_ACCELERATOR"] == "cpu" for environ in runs.environs)
    near = ("commlayer", [2.0, 1.0000005], 0)
    monkeypatch.setattr(subprocess, "run", Runs(GLOO, near, OURS))
    assert compare.compare("deepspeed").endswith("| within 1e-06 |")


def test_the_sums_of_the_parameters_tell_how_alike_runs_are() -> None:
    runs = [{"losses": [1.0], "sum": 3.0}, {"losses": [1.0000001], "sum": 3.0}]
    assert compare.likeness(runs, 1e-6) == "within 1e-06; parameters bit by bit"
    assert compare.likeness([*runs, {"losses": [1.0], "sum": 3.1}], 1e-6) == "within 1e-06"


@pytest.mark.parametrize(
    "results",
    [
        (OURS, OURS, OURS),
        (GLOO, GLOO, OURS),
        (GLOO, OURS, GLOO),
        (GLOO, OURS, ("commlayer", [2.0, 1.00001], 0)),
        (GLOO, OURS, ("commlayer", [2.0], 0)),
        (GLOO, OURS, ("commlayer", [2.0, float("nan")], 0)),
    ],
)
def test_differences_are_found(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Runs(*results))
    with pytest.raises(AssertionError):
        compare.compare("lightning")


def test_a_failed_run_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Runs(("gloo", [1.0], 3)))
    with pytest.raises(RuntimeError, match=r"(?s)lightning : exit code 3\n.*why"):
        compare.compare("lightning")


def test_two_ranks_may_end_in_one_line() -> None:
    line = json.dumps({"backend": "gloo", "losses": [1.0]}) + json.dumps({"backend": "gloo", "losses": [2.0]})
    ended = subprocess.CompletedProcess([], 0, f"noise {{}}\n[1] {line}\n\n", "")
    assert [result["losses"] for result in compare.results(ended)] == [[1.0], [2.0]]
