"""The option `--json FILE`, the same in every command: a file, or `-` for standard output, where it replaces the report
for people."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import typer

STDOUT = Path("-")


def _is_named(path: Path | None) -> Path | None:
    """Refuses an option that stands where the name of the file should."""
    if path is not None and path != STDOUT and str(path).startswith("-"):
        raise typer.BadParameter(f"{path} is no file: name one, or - for standard output")
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json", "-J", metavar="FILE", callback=_is_named, help="File for all figures; -: standard output, alone"
    ),
]


def check(path: Path | None, option: str = "--json", *, is_new: bool = False) -> None:
    """Raises ValueError if the file cannot be written, or is there and should be new: a command that reads files, and
    to which a word was given in the wrong place, must not write over them. Call it before measuring."""
    if path is None or path == STDOUT:
        return
    if is_new and path.exists():
        raise ValueError(f"{option} {path}: that file is there already; name a new one, or - for standard output")
    folder = path.parent
    if path.is_dir() or not folder.is_dir():
        problem = "that is a folder" if path.is_dir() else f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "no permission to write there"
    else:
        return
    raise ValueError(f"{option} {str(path)!r}: {problem}; name a file that can be written")


def deliver(table: Mapping[str, Any] | Sequence[Any], path: Path | None, show: Callable[[], None]) -> None:
    """Prints the table alone, or writes it to the file, if there is one, and shows the report."""
    if path == STDOUT:
        print(json.dumps(table), flush=True)
        return
    if path is not None:
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    show()


@contextlib.contextmanager
def stream(path: Path | None) -> Iterator[IO[str] | None]:
    """The file for a command that writes a table per line, as long as it runs; None without one."""
    if path is None or path == STDOUT:
        yield None if path is None else sys.stdout
        return
    with path.open("w", encoding="utf-8") as file:
        yield file
