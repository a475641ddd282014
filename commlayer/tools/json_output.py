"""The option `--json` of a command: a file, or standard output, where it replaces the report for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .bench.report import check_writable

STDOUT = Path("-")


def check(path: Path | None, option: str = "--json") -> None:
    """Raises ValueError if the file cannot be written. Call it before measuring."""
    if path is not None and path != STDOUT:
        check_writable(path, option)


def deliver(table: Mapping[str, Any], path: Path | None, show: Callable[[], None]) -> None:
    """Prints the table alone, or writes it to the file, if there is one, and shows the report."""
    if path == STDOUT:
        print(json.dumps(table))
        return
    if path is not None:
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    show()
