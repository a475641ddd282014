"""`commlayer config`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import commlayer_environment
from commlayer.tools import cli

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's file of settings."""
    monkeypatch.setattr(commlayer_environment, "STARTED_IN", str(tmp_path))
    path = tmp_path / "commlayer.toml"
    path.write_text('[process]\nports = 2\nlog = "info"\n[policy]\ncodec = "int8"\n')
    path.chmod(0o644)
    return path


def config(*arguments: str, **environ: str) -> Any:
    return RUNNER.invoke(cli.app, ["config", *arguments], env=environ)


def test_every_setting_has_its_value_and_source(file: Path) -> None:
    found = json.loads(config("--json", "-", COMMLAYER_LOG="debug").output)
    assert found["file"] == str(file)
    by_name = {(setting["section"], setting["name"]): setting for setting in found["settings"]}
    values = {key: (row["value"], row["source"], row["where"]) for key, row in by_name.items()}
    assert values["process", "ports"] == (2, "file", str(file))
    assert values["process", "log"] == ("debug", "environment", "COMMLAYER_LOG")
    assert values["process", "mtu"] == (0, "default", None)
    assert values["policy", "codec"] == ("int8", "file", str(file))
    assert values["ddp", "hook"] == (False, "default", None)


def test_the_table_fits_into_80_columns() -> None:
    lines = config(COMMLAYER_LOG="debug").output.splitlines()
    assert max(map(len, lines[1:])) <= 80  # a path stays whole
    cells = [line.split() for line in lines]
    assert ["log", "debug", "COMMLAYER_LOG"] in cells
    assert ["ports", "2", "file"] in cells
    assert ["shm", "true", "default"] in cells
    assert lines[-1] == "2 of the file's settings are in use"


def test_changed_leaves_out_defaults() -> None:
    lines = config("--changed").output.splitlines()
    assert [line.split()[0] for line in lines[1:-1] if line.strip()] == [
        "[process]",
        "ports",
        "log",
        "[policy]",
        "codec",
    ]


def test_check_looks_at_a_file_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[ddp]\noverlap = true\n")
    ended = config("--check", str(other), COMMLAYER_LOG="nonsense")
    assert ended.exit_code == 0
    assert "1 of the file's settings is in use" in ended.output
    other.write_text("[ddp]\nbucket_mb = -1\n")
    ended = config("--check", str(other))
    assert ended.exit_code == 2
    assert f"{other}: [ddp] bucket_mb = -1: use a number, 0 (DDP's own), or 0.1 to 4096" in ended.output


def test_contradictions_are_errors(file: Path) -> None:
    file.write_text('[policy]\ncodec = "int8"\nalgorithm = "ring"\n')
    ended = config("--check", str(file))
    assert ended.exit_code == 2
    assert "a ring would round at every hop" in ended.output
    assert "(the file sets algorithm, codec)" in ended.output
