"""The job's file of settings: where it is, and which files are refused."""

import os
import re
from pathlib import Path

import pytest

import commlayer_environment
from commlayer.config_file import ConfigFile, of_job
from commlayer.errors import ConfigError

TEXT = "[process]\nports = 2\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the job was started."""
    monkeypatch.setattr(commlayer_environment, "STARTED_IN", str(tmp_path))
    return tmp_path


def write(path: Path, text: str = TEXT, mode: int = 0o644) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_job_without_a_file_has_no_settings_from_one(folder: Path) -> None:
    assert of_job({}) == ConfigFile("", {})


def test_the_file_in_the_folder_of_the_start_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "commlayer.toml")
    monkeypatch.chdir("/")  # a script may change its folder
    assert of_job({}) == ConfigFile(str(folder / "commlayer.toml"), {"process": {"ports": 2}})


@pytest.mark.parametrize("name", ["other.toml", "./other.toml"])
def test_a_named_file_is_read_instead(folder: Path, name: str) -> None:
    write(folder / "commlayer.toml", "[process]\nports = 3\n")
    write(folder / "other.toml")
    found = of_job({"COMMLAYER_CONFIG": f" {name}"})
    assert Path(found.path).samefile(folder / "other.toml")
    assert found.sections == {"process": {"ports": 2}}


def test_a_file_is_read_once(folder: Path) -> None:
    path = write(folder / "commlayer.toml")
    before = of_job({})
    path.write_text("not TOML")
    assert of_job({}) is before


def test_a_named_file_that_does_not_exist_is_an_error(folder: Path) -> None:
    path = folder / "nothing.toml"
    told = f"{path}: No such file or directory; name a file of settings with COMMLAYER_CONFIG or --check"
    with pytest.raises(ConfigError, match=re.escape(told)):
        of_job({"COMMLAYER_CONFIG": str(path)})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ports = ", "not TOML: "),
        ("\xff", "not TOML: "),
        ("ports = 2", "ports = 2: settings belong to a section; put [process] above it"),
        ("#" * 65537, "not a file of at most 65536 bytes"),
    ],
)
def test_faulty_text_is_an_error(folder: Path, text: str, told: str) -> None:
    path = folder / "commlayer.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {told}")):
        of_job({})


def test_pipes_and_folders_are_not_read(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for path in (folder / "pipe", folder):
        with pytest.raises(ConfigError, match=r"not a file of at most|Is a directory"):
            of_job({"COMMLAYER_CONFIG": str(path)})


def test_a_file_that_everybody_may_write_must_be_named(folder: Path) -> None:
    path = write(folder / "commlayer.toml", mode=0o666)
    told = f"{path}: every user may write it, .* name it with COMMLAYER_CONFIG={path}"
    with pytest.raises(ConfigError, match=told):
        of_job({})
    assert of_job({"COMMLAYER_CONFIG": str(path)}).sections == {"process": {"ports": 2}}


def test_a_file_of_another_user_must_be_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder / "commlayer.toml")
    user = path.stat().st_uid
    if user == 0:  # that of root is trusted
        user = 1234
        os.chown(path, user, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=f"{path}: it belongs to user {user}, and a stranger's settings could expose"):
        of_job({})
    assert of_job({"COMMLAYER_CONFIG": str(path)}).sections == {"process": {"ports": 2}}
