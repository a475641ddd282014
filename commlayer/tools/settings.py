"""`commlayer config`: the settings of a job that starts here, and where each comes from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..config import SECTIONS, Found, made_of, sources
from ..config_file import ConfigFile, of_job, read
from ..errors import ConfigError
from .complaint import fail
from .json_output import JsonOption, deliver
from .json_output import check as check_json


def config(
    check: Annotated[
        Path | None, typer.Option(help="A file to check, instead of the one that a job here reads")
    ] = None,
    json_path: JsonOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that are not the defaults")] = False,
) -> None:
    """Show each setting of a job that starts in this folder: its value, and where that comes from.

    A variable counts more than the file (COMMLAYER_CONFIG, or ./commlayer.toml), the file more than the default. A
    script's own code counts more than all of these, and is not visible here.

    Try it: COMMLAYER_POLICY_CODEC=int8 commlayer config --changed

    A file alone: commlayer config --check commlayer.toml

    Exit status: 0; 2 if a setting is wrong.
    """
    try:
        check_json(json_path)
        file = of_job(os.environ) if check is None else read(str(check))
        found = sources(file, os.environ if check is None else {})
        made_of(found)
    except (ValueError, ConfigError) as error:
        fail("config", error)
    deliver(
        plain(file, found, only_changed=changed),
        json_path,
        lambda: show(file, found, Console(highlight=False, markup=False), only_changed=changed or check is not None),
    )


def plain(file: ConfigFile, found: dict[str, dict[str, Found]], *, only_changed: bool = False) -> dict[str, Any]:
    """The settings as plain values."""
    return {
        "file": file.path or None,
        "settings": [
            {
                "section": section,
                "name": name,
                "value": setting.value,
                "source": setting.source,
                "where": setting.where or None,
            }
            for section, settings in found.items()
            for name, setting in settings.items()
            if not only_changed or setting.source != "default"
        ],
    }


def show(file: ConfigFile, found: dict[str, dict[str, Found]], out: Console, *, only_changed: bool = False) -> None:
    """Prints the settings as a table."""
    out.print(
        f"file: {file.path or 'none (COMMLAYER_CONFIG is not set, and there is no ./commlayer.toml)'}", soft_wrap=True
    )
    for section in SECTIONS:
        entries = {
            name: setting for name, setting in found[section].items() if not only_changed or setting.source != "default"
        }
        if not entries:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), title=f"\n[{section}]", title_justify="left", show_header=False)
        for column in ("setting", "value", "source"):
            table.add_column(column, overflow="fold")
        for name, setting in entries.items():
            style = "bold" if setting.source != "default" else None
            table.add_row(
                name,
                _shown(setting.value),
                setting.where if setting.source == "environment" else setting.source,
                style=style,
            )
        out.print(table)
    count = sum(setting.source == "file" for settings in found.values() for setting in settings.values())
    if file.path:
        are = "is" if count < 2 else "are"
        out.print(f"\n{count or 'none'} of the file's settings {are} in use")
    sys.stdout.flush()


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "unset"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value) or "unset"
