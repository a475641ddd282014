"""Files of results: JSON with a line for each run, so that a difference between two commits shows the runs."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINE = 1000
"""Characters of an object that stays on one line."""


def read_results(path: Path, otherwise: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The results in a file. `otherwise`: those of a benchmark that kept none yet.

    Raises FileNotFoundError if there is no file, and nothing to return otherwise.
    """
    if otherwise is not None and not path.exists():
        return copy.deepcopy(dict(otherwise))
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


def today() -> str:
    """The date of a measurement."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Replaces the file as a whole: a benchmark may be interrupted while it writes."""
    written = path.with_suffix(".new")
    written.write_text(_text(results) + "\n", encoding="utf-8")
    written.replace(path)


def _text(value: Any) -> str:
    """JSON: a line for each object of a list; a line for each entry of a long object, whose value may have several. An
    object of plain values stays on one line, as the times of a search."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "[\n{}\n]".format(",\n".join(map(json.dumps, value)))
    if isinstance(value, dict) and len(json.dumps(value)) > LINE and any(map(_has_parts, value.values())):
        return "{{\n{}\n}}".format(",\n".join(f"{json.dumps(key)}: {_text(item)}" for key, item in value.items()))
    return json.dumps(value)


def _has_parts(value: Any) -> bool:
    return isinstance(value, (dict, list))
