"""docs/settings.md has everything that can be set, with its default: here it is compared with the code."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from commlayer import ByLayer, BySteps, GradientNorm, HookState, Options
from docs import settings
from tests.documents import table


def rows(heading: str) -> dict[str, list[str]]:
    head, *body = table("settings.md", heading)
    assert head[1:] == ["unit", "default", "meaning"]
    return {name: cells for name, *cells in body}


def test_generated_tables_are_up_to_date(tmp_path: Path) -> None:
    page = tmp_path / "settings.md"
    page.write_text(settings.PAGE.read_text())
    settings.write(page)
    assert page.read_text() == settings.PAGE.read_text(), "run `make settings`"


def test_tables_show_defaults_as_they_are_written() -> None:
    variables, fields = rows("Environment variables"), rows("Policy")
    assert [variables[f"COMMLAYER_{name}"][1] for name in ("IFNAME", "SHM", "MTU")] == ["unset", "1", "0"]
    assert [fields[name][1] for name in ("deterministic", "loss_bound", "algorithm")] == ["False", "0.0", "auto"]


def test_a_page_without_a_marker_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "settings.md"
    page.write_text(settings.PAGE.read_text().replace("<!-- Policy:end -->", ""))
    with pytest.raises(ValueError, match=r"settings\.md lacks <!-- Policy:begin --> or <!-- Policy:end -->"):
        settings.write(page)


@pytest.mark.parametrize(("heading", "kind"), [("Options", Options), ("HookState", HookState)])
def test_every_argument_has_a_row(heading: str, kind: Any) -> None:
    arguments = set(inspect.signature(kind).parameters)
    assert arguments <= set(rows(heading))


@pytest.mark.parametrize("kind", [BySteps, ByLayer, GradientNorm])
def test_every_argument_has_a_row_with_its_default(kind: Any) -> None:
    arguments = inspect.signature(kind).parameters
    found = {name: default for name, (unit, default, meaning) in rows(kind.__name__).items() if unit and meaning}
    assert found == {
        name: "" if argument.default is argument.empty else str(argument.default)
        for name, argument in arguments.items()
    }


def test_every_row_says_unit_default_and_meaning() -> None:
    for heading in ("commlayer.toml", "Environment variables", "Policy", "Options", "HookState"):
        assert all(unit and default and meaning for unit, default, meaning in rows(heading).values()), heading
