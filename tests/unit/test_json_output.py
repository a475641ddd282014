"""`--json`: a file beside the report, or standard output instead of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commlayer.tools.json_output import STDOUT, check, deliver


def test_standard_output_has_the_table_alone(capsys: pytest.CaptureFixture[str]) -> None:
    deliver({"a": 1}, STDOUT, lambda: print("report"))
    assert json.loads(capsys.readouterr().out) == {"a": 1}


@pytest.mark.parametrize("has_file", [False, True])
def test_the_report_is_shown_beside_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], has_file: bool) -> None:
    path = tmp_path / "found.json"
    deliver({"a": 1}, path if has_file else None, lambda: print("report"))
    assert capsys.readouterr().out == "report\n"
    assert path.exists() == has_file
    assert not has_file or json.loads(path.read_text()) == {"a": 1}


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    check(None)
    check(STDOUT)
    check(tmp_path / "found.json")
    with pytest.raises(ValueError, match=r"--png .*there is no folder"):
        check(tmp_path / "none" / "found.png", "--png")
