"""The commands `python -m bench.NAME`: shared options, and pages that name no command that is gone."""

import argparse
import importlib.util
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.harness.options import options

ROOT = Path(__file__).parents[3]


def test_shared_options_have_the_type_of_their_cases() -> None:
    parser = options("about", only=(20, 100), rounds=5, seeds=3, quick="one round", table=True)
    given = parser.parse_args(["--only", "20", "--only", "100", "--rounds", "2", "--quick"])
    assert (given.only, given.rounds, given.seeds, given.quick, given.table) == ([20, 100], 2, 3, True, False)
    assert "one round; keeps nothing" in parser.format_help()
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--only", "30"])


def test_a_benchmark_has_no_options_that_it_does_not_name() -> None:
    assert vars(options(None).parse_args([])) == {"only": None, "quick": False, "table": False, "rank": None}
    with pytest.raises(SystemExit, match="2"):
        options(None).parse_args(["--table"])


def test_all_commands_in_pages_and_scripts_are_there() -> None:
    files = subprocess.run(["git", "ls-files", "*.md", "*.py", "Makefile"], cwd=ROOT, capture_output=True, text=True)
    named = {
        name
        for file in files.stdout.split()
        if file != "CHANGELOG.md" and (ROOT / file).exists()
        for name in re.findall(r"-m (bench\.[a-z_.0-9]+\b)", (ROOT / file).read_text(encoding="utf-8"))
    }
    assert {"bench.stress", "bench.jobs.headroom"} <= named
    assert [name for name in sorted(named) if importlib.util.find_spec(name) is None] == []


def documented() -> list[str]:
    """The commands of the pages and of the benchmarks' own texts, without those that have a placeholder."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.py"), ROOT / "Makefile"]
    texts = [file.read_text(encoding="utf-8") for file in files if file.name != "CHANGELOG.md"]
    found = {
        re.split(r" {2,}|[#),;]", command)[0].strip()
        for text in texts
        for command in re.findall(r"python -m (bench\.\w+[^`|\n]*)", text)
    }
    found = {command.rstrip('."') if command.count('"') == 1 else command.rstrip(".") for command in found}
    return sorted(command for command in found if not re.search(r"[$\[{…]|\b[A-Z]{3,}\b", command))


class Parsed(Exception):  # noqa: N818
    """The arguments were valid."""


@pytest.mark.parametrize("command", documented())
def test_documented_commands_are_valid(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    name, *words = shlex.split(command)
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any) -> None:
        parse(parser, *given)
        raise Parsed

    monkeypatch.setattr("argparse.ArgumentParser.parse_args", stop)
    monkeypatch.setattr("sys.argv", [name, *words])
    with pytest.raises(Parsed):
        runpy.run_module(name, run_name="__main__")


def test_one_place_makes_parsers() -> None:
    """But for the script of a new user, which is started by its path and imports nothing of bench."""
    made = [path for path in (ROOT / "bench").rglob("*.py") if "ArgumentParser(" in path.read_text(encoding="utf-8")]
    assert sorted(path.relative_to(ROOT / "bench").as_posix() for path in made) == [
        "harness/options.py",
        "jobs/new_user.py",
    ]
