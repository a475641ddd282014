"""A file is there as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlayer.transport.whole_file import whole_file


def test_the_file_takes_its_name_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "name.json"
    path.write_text("old", encoding="utf-8")
    with whole_file(path) as part:
        part.write_text("new", encoding="utf-8")
        assert path.read_text(encoding="utf-8") == "old"
    assert path.read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with whole_file(tmp_path / "name.json") as part:
            part.write_text("half", encoding="utf-8")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_writers_of_one_name_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "name.json"
    with whole_file(path) as first, whole_file(path) as second:
        assert first != second
        first.write_text("first", encoding="utf-8")
        second.write_text("second", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "first"
