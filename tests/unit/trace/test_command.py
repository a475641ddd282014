"""`commlayer trace` from the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commlayer.tools import cli
from commlayer.tools.complaint import EXIT_FAILED
from commlayer.tools.trace import command, serve

from .files import collective, flight, write

RUNNER = CliRunner()


def job(folder: Path) -> list[str]:
    """The files of two ranks, whose clocks differ by 3 s."""
    one, other = flight(0, [collective(1, 0, 5)]), flight(1, [collective(1, 3001, 3005)])
    return [str(path) for path in write(folder, one=one, other=other)]


def test_files_become_one_trace(tmp_path: Path) -> None:
    output = tmp_path / "all.json"
    result = RUNNER.invoke(cli.app, ["trace", *job(tmp_path), "-o", str(output), "--json", "-"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["output"], found["warnings"]) == (str(output), [])
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["ranks"][1]["offset_s"] == pytest.approx(-3, abs=found["ranks"][1]["uncertainty_s"])
    assert [file["path"] for rank in found["ranks"] for file in rank["files"]] == job(tmp_path)
    trace = json.loads(output.read_text())
    assert len(trace["traceEvents"]) == found["events"]
    assert trace["otherData"]["clocks"] == found["ranks"]
    assert "±" in result.stderr
    assert max(map(len, result.stderr.splitlines()[:-1])) <= 80


def test_without_json_nothing_is_printed_to_a_pipe(tmp_path: Path) -> None:
    result = RUNNER.invoke(cli.app, ["trace", *job(tmp_path), "-o", str(tmp_path / "all.json")])
    assert result.stdout == ""
    assert "events of 2 ranks. Open it at" in " ".join(result.stderr.split())  # the path decides where lines end


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("hello")
    result = RUNNER.invoke(cli.app, ["trace", str(path)])
    assert result.exit_code == EXIT_FAILED
    assert result.stderr.startswith(f"commlayer trace: {path}: not JSON; name flight records")


def test_a_trace_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    files = [Path(name) for name in job(tmp_path)]
    output = tmp_path / "all.json"
    output.mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"all.json: .*; name a file that can be made with -o"):
        command.run(files, output, lambda _: None)
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_folder_is_an_error_before_the_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("no record")
    output = tmp_path / "none/all.json"
    result = RUNNER.invoke(cli.app, ["trace", str(path), "-o", str(output)])
    assert result.exit_code == EXIT_FAILED
    said = f"commlayer trace: --output '{output}': there is no folder {output.parent}; name a file that can be written"
    assert result.stderr == f"{said}\n"


def test_open_serves_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Path] = []
    monkeypatch.setattr(serve, "serve", lambda path, _: served.append(path))
    output = tmp_path / "all.json"
    assert RUNNER.invoke(cli.app, ["trace", *job(tmp_path), "-o", str(output), "--open"]).exit_code == 0
    assert served == [output]


def test_an_interrupt_ends_it_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "serve", interrupted)
    result = RUNNER.invoke(cli.app, ["trace", *job(tmp_path), "-o", str(tmp_path / "all.json"), "--open"])
    assert result.exit_code == 130


def test_the_help_has_an_example() -> None:
    result = RUNNER.invoke(cli.app, ["trace", "--help"])
    assert "Example: commlayer trace" in result.output
