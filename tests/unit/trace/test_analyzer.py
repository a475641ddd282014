"""What torch's analyzer gets: it reads pickles and evaluates some of their text; neither may come from a stranger."""

import json
import pickle
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commlayer.tools import cli
from commlayer.tools.complaint import EXIT_FAILED

from .files import collective, flight, profile, write

RUNNER = CliRunner()


def test_records_become_pickles_of_the_user_alone(tmp_path: Path) -> None:
    given = flight(1, [collective(1, 0, 5)])
    (name,) = given["pg_config"]
    given["pg_config"][name]["ranks"] = "[0, 1] + [__import__('os').getpid()]"  # the analyzer evaluates it
    write(tmp_path, flight_1=given)
    folder = tmp_path / "private" / "new"
    arguments = ["trace", str(tmp_path), "-o", str(tmp_path / "trace.json"), "--analyzer", str(folder)]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 0
    assert f"Now: torchfrtrace {folder}" in " ".join(result.stderr.split())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (made,) = folder.iterdir()
    assert (made.name, stat.S_IMODE(made.stat().st_mode)) == ("flight_1", 0o600)
    dump = pickle.loads(made.read_bytes())
    assert dump["entries"] == json.loads(json.dumps(given["entries"]))
    assert dump["pg_config"][name]["ranks"] == "[0, 1]"


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_of_others_and_no_record_are_errors(tmp_path: Path, there: bool) -> None:
    files = tmp_path / "files"
    files.mkdir()
    write(files, a=flight(0, [collective(1, 0, 5)]) if there else profile(0, []))
    arguments = ["trace", str(files), "-o", str(tmp_path / "trace.json"), "--analyzer", str(tmp_path)]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == EXIT_FAILED
    assert ("name a folder that is not there yet" if there else "no flight record is there") in result.stderr
