"""Writes the tables of docs/settings.md that come from commlayer/config.py and commlayer/policy.py: `make settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.harness.page import write_between
from commlayer.config import Config, Ddp, Policy, rows, variable

PAGE = Path(__file__).with_name("settings.md")


def table(settings: Any) -> str:
    """The rows of a class of settings as a table in Markdown."""
    lines = [
        "| variable | unit | default | meaning |" if settings is Config else "| field | unit | default | meaning |"
    ]
    lines.append("|---|---|---|---|")
    for row in rows(settings):
        name = variable(row.name) if settings is Config else row.name
        unit, default = row.kind.unit, row.default
        if isinstance(default, bool):
            unit, default = ("0 or 1", int(default)) if settings is Config else ("bool", default)
        shown = "unset" if default in ("", ()) else f"`{default}`"
        meaning = f"{row.meaning}. **Ranks compare it**" if row.is_common else row.meaning
        lines.append(f"| `{name}` | {unit} | {shown} | {meaning} |")
    return "\n".join(lines)


def write(page: Path) -> None:
    """Writes the tables between their markers. Raises ValueError if the page lacks one."""
    write_between(page, **{kind.__name__: table(kind) for kind in (Config, Policy, Ddp)})


if __name__ == "__main__":
    write(PAGE)
