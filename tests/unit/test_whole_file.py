"""A file is there as a whole, or not at all."""

import os
import stat
from pathlib import Path

import pytest

from commlayer.transport.whole_file import whole_file


def test_the_file_takes_its_name_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "name.json"
    path.write_text("old", encoding="utf-8")
    with whole_file(path) as part:
        part.write(b"new")
        assert path.read_text(encoding="utf-8") == "old"
    assert path.read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with whole_file(tmp_path / "name.json") as part:
            part.write(b"half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_writers_of_one_name_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "name.json"
    with whole_file(path) as first, whole_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_text(encoding="utf-8") == "first"


def test_it_belongs_to_its_user_whatever_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with whole_file(tmp_path / "name.json") as part:
            part.write(b"line of code")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "name.json").stat().st_mode) == 0o600


def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "name.json"
    victim.write_text("precious", encoding="utf-8")
    path.symlink_to(victim)
    with whole_file(path) as part:
        part.write(b"new")
    assert (victim.read_text(encoding="utf-8"), path.is_symlink()) == ("precious", False)
