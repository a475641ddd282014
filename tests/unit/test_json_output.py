"""`--json FILE`, in one form in all commands: a file beside the report, or standard output instead of it. And help."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from commlayer.tools import cli
from commlayer.tools.json_output import STDOUT, check, deliver, stream
from commlayer.tools.top.options import show
from commlayer.tools.top.summary import summarize

RUNNER = CliRunner()


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


def commands() -> dict[str, Any]:
    """All commands of `commlayer`, by name."""
    group: Any = get_command(cli.app)
    return dict(group.commands)


def help_lines(name: str, columns: int) -> list[str]:
    environ = {"COLUMNS": str(columns), "TERM": "xterm"}  # on a terminal that is "dumb", Rich takes 80
    return [
        line.rstrip() for line in RUNNER.invoke(cli.app, [*name.split(), "--help"], env=environ).output.splitlines()
    ]


WITHOUT_FIGURES = {"check", "emulate"}


def test_all_commands_have_one_form_of_it() -> None:
    found = {
        name: [param for param in command.params if "--json" in param.opts] for name, command in commands().items()
    }
    assert {name for name, options in found.items() if not options} == WITHOUT_FIGURES
    forms = {(tuple(option.opts), option.is_flag, option.metavar) for options in found.values() for option in options}
    assert forms == {(("--json", "-J"), False, "FILE")}


@pytest.mark.parametrize("name", sorted(set(commands()) - WITHOUT_FIGURES))
def test_without_a_file_it_is_an_error(name: str) -> None:
    """It was a switch in some commands."""
    words = name.split()
    alone, before = (RUNNER.invoke(cli.app, [*words, "--json", *more]) for more in ([], ["--help-me"]))
    assert (alone.exit_code, before.exit_code) == (2, 2)
    assert "requires an argument: FILE (" in " ".join(alone.stderr.split())
    assert "is no file: name one, or - for standard output" in " ".join(before.stderr.replace("│", " ").split())


def test_a_file_to_read_is_not_written_over(tmp_path: Path) -> None:
    """What `commlayer trace --json FILES` would do, which was right when it was a switch."""
    one, other = tmp_path / "flight_0.json", tmp_path / "flight_1.json"
    one.write_text("{}", encoding="utf-8")
    other.write_text("{}", encoding="utf-8")
    ended = RUNNER.invoke(cli.app, ["trace", "--json", str(one), str(other)])
    assert ended.exit_code == 2
    assert "name a new one, or - for standard output" in ended.stderr
    assert one.read_text(encoding="utf-8") == "{}"


def test_a_table_per_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = summarize({"samples": [], "ended": [], "ages": {}})
    for path in (STDOUT, tmp_path / "views.jsonl", None):
        with stream(path) as file:
            for _ in range(2):
                show(view, file, once=True, rows=0, paths=False)
        printed = capsys.readouterr().out
        lines = printed if path == STDOUT else path.read_text(encoding="utf-8") if path else ""
        assert [json.loads(line) for line in lines.splitlines()] == ([view] * 2 if path else [])
        assert (path == STDOUT) != ("0 of 0 ranks" in printed)


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("name", sorted(commands()))
def test_help_fills_its_lines(name: str, columns: int) -> None:
    lines = help_lines(name, columns)
    assert max(map(len, lines)) == columns  # as wide as asked for
    assert [line for line in lines if "…" in line] == []
    text = lines[: next(number for number, line in enumerate(lines) if line.startswith("╭"))]
    short = [
        line
        for line, below in itertools.pairwise(text)
        if line and below and len(line) + 1 + len(below.split()[0]) < columns
    ]
    assert short == []


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_tells_the_exit_status(name: str) -> None:
    assert "Exit status" in " ".join(help_lines(name, 80))
