"""`commlayer tune` from its options to the file, with a job that is only imagined."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import commlayer_environment
from commlayer import config
from commlayer.config import Config, Policy
from commlayer.tools import cli
from commlayer.tools.headroom import command as headroom
from commlayer.tools.headroom.timing import Timing
from commlayer.tools.tune import command as tuning
from commlayer.tools.tune.arm import Arm
from tests.unit.tune.test_halving import Job
from tests.unit.tune.test_model import parts


def profile(*, is_little: bool = False, takes_hook: bool = True, backend: str = "gloo") -> Any:
    """What tune takes from the report of headroom."""
    return SimpleNamespace(
        split=parts(as_is_s=(1.0, 1.0, 1.01)),
        verdict="all about the step",
        is_little=is_little,
        backend=backend,
        hosts=4,
        takes_hook=takes_hook,
    )


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job that is fast with int8."""

    class Fast(dict[Arm, float]):
        def __missing__(self, arm: Arm) -> float:
            return 1.0 if arm.is_default else {"none": 0.9, "int8": 0.5}.get(arm.codec, 0.7)

        def __contains__(self, arm: object) -> bool:
            return True

    found = Job(Fast())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commlayer_environment, "STARTED_IN", str(tmp_path))
    monkeypatch.setattr(headroom, "measure", lambda _options, _note: profile())
    monkeypatch.setattr(tuning, "trial", lambda _options, arm, steps: found(arm, steps))
    return found


def tune(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["tune", *arguments, "--", "torchrun", "train.py"])


def test_the_file_has_the_settings_and_a_sentence_for_each(tmp_path: Path) -> None:
    ended = tune("--allow", "compressed", "--json", "figures.json")
    assert ended.exit_code == 0, ended.output
    file = tmp_path / "commlayer.toml"
    text = file.read_text()
    found = config.of_job({"COMMLAYER_CONFIG": str(file)})
    assert found["process"] == Config(instead_of="gloo")
    assert found["policy"] == Policy(codec="int8")
    assert found["ddp"].overlap or found["ddp"].hook
    assert "# Written by commlayer tune -- torchrun train.py" in text
    assert re.search(r"# A step takes 5\d\d ms instead of 1 s, (49|50|51)% less \(95 % interval: ", text)
    assert "# commlayer in gloo's place, without another change: 900 ms per step, 1 s with gloo." in text
    assert re.search(r"# int8 sends 26% of the bytes, and gradients are rounded: .* with float32.*\.", text)
    table = json.loads((tmp_path / "figures.json").read_text())
    assert table["settings"]["policy"] == {"codec": "int8"}
    assert table["gain"] == pytest.approx(0.5, abs=0.02)
    assert table["tried"][0]["arm"] == "the job as it is"
    assert len(table["tried"]) <= 8
    assert max(map(len, ended.output.split("Written to")[0].splitlines()[-12:])) <= 80


def test_numerics_stay_without_allow(job: Job) -> None:
    tune()
    assert job.trials
    assert all(not arm.needs for arm, _ in job.trials)


def test_a_job_that_takes_no_hook_is_not_credited_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    monkeypatch.setattr(headroom, "measure", lambda _options, _note: profile(takes_hook=False))
    ended = tune("--allow", "compressed")
    assert ended.exit_code == 0
    assert "not tried: overlap, buckets and codecs need a DistributedDataParallel" in ended.output
    assert {arm.codec for arm, _ in job.trials} == {"none"}
    assert "instead_of" in (tmp_path / "commlayer.toml").read_text()
    assert "overlap" not in (tmp_path / "commlayer.toml").read_text()


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    file = tmp_path / "commlayer.toml"
    file.write_text("[process]\nports = 2\n[policy]\npriority = 3\n")
    file.chmod(0o644)
    ended = tune()
    assert ended.exit_code == 2
    assert "commlayer.toml exists: name another file with --out, or write over it with --force" in ended.output
    assert tune("--allow", "compressed", "--force").exit_code == 0
    found = config.of_job({"COMMLAYER_CONFIG": str(file)})
    assert found["process"] == Config(ports=2, instead_of="gloo")
    assert found["policy"] == Policy(codec="int8", priority=3)


def test_of_starters_that_are_ranks_the_first_one_tells_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")  # as of `commlayer emulate`
    ended = tune("--allow", "compressed", "--json", "figures.json")
    assert (ended.exit_code, ended.output) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_little_to_win_ends_it_at_once(monkeypatch: pytest.MonkeyPatch, job: Job, tmp_path: Path) -> None:
    monkeypatch.setattr(headroom, "measure", lambda _options, _note: profile(is_little=True))
    ended = tune()
    assert ended.exit_code == 0
    assert "all about the step" in ended.output
    assert not job.trials
    assert not (tmp_path / "commlayer.toml").exists()


def test_a_job_that_is_best_as_it_is_gets_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "trial", lambda _options, arm, steps: Timing((1.0 if arm.is_default else 1.1,) * steps))
    ended = tune("--trials", "2")
    assert ended.exit_code == 0
    assert "The job stays as it is" in ended.output
    assert not (tmp_path / "commlayer.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--allow", "fast"], "--allow fast: use some of lossy,compressed,stale"),
        (["--trials", "0"], "--trials 0: use at least 1"),
        (["--steps", "2"], "--steps 2: use at least 6"),
        (["--out", "no/such/folder.toml"], "--out"),
    ],
)
def test_wrong_options_name_value_and_remedy(arguments: list[str], told: str) -> None:
    ended = tune(*arguments)
    assert ended.exit_code == 2
    assert told in ended.output


def test_the_job_must_be_named() -> None:
    ended = CliRunner().invoke(cli.app, ["tune"])
    assert ended.exit_code == 2
    assert "name the job: commlayer tune -- torchrun" in ended.output
