"""docs/settings.md has a row for everything that can be set, with its default: here it is compared with the code."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from commlayer import ByLayer, BySteps, Config, GradientNorm, HookState, Options, Policy
from tests.documents import table

ENVIRONMENT = {f"COMMLAYER_{field.name.upper()}": field.default for field in dataclasses.fields(Config)}


def rows(heading: str) -> dict[str, list[str]]:
    head, *body = table("settings.md", heading)
    assert head[1:] == ["unit", "default", "meaning"]
    return {name: cells for name, *cells in body}


def test_every_variable_has_a_row() -> None:
    assert set(rows("Environment variables")) == set(ENVIRONMENT)


def test_every_field_of_a_policy_has_a_row() -> None:
    assert set(rows("Policy")) == {field.name for field in dataclasses.fields(Policy)}


@pytest.mark.parametrize(("heading", "kind"), [("Options", Options), ("HookState", HookState)])
def test_every_argument_has_a_row(heading: str, kind: Any) -> None:
    arguments = set(inspect.signature(kind).parameters)
    assert arguments <= set(rows(heading))


@pytest.mark.parametrize("kind", [BySteps, ByLayer, GradientNorm])
def test_every_argument_has_a_row_with_its_default(kind: Any) -> None:
    arguments = inspect.signature(kind).parameters
    found = {name: default for name, (unit, default, meaning) in rows(kind.__name__).items() if unit and meaning}
    assert found == {name: "" if each.default is each.empty else str(each.default) for name, each in arguments.items()}


def test_every_row_says_unit_and_meaning() -> None:
    for heading in ("Environment variables", "Policy", "Options", "HookState"):
        assert all(unit and default and meaning for unit, default, meaning in rows(heading).values()), heading


@pytest.mark.parametrize(("heading", "defaults"), [("Environment variables", ENVIRONMENT), ("Policy", None)])
def test_defaults_are_those_of_the_code(heading: str, defaults: dict[str, Any] | None) -> None:
    wanted = {field.name: field.default for field in dataclasses.fields(Policy)} if defaults is None else defaults
    in_words = {"COMMLAYER_IFNAME": "all usable", "COMMLAYER_OFI_PROVIDER": "libfabric's first"}
    flags = {"COMMLAYER_SHM": "1", "COMMLAYER_MARK": "0"}
    for name, (_unit, default, _meaning) in rows(heading).items():
        assert default == {**in_words, **flags}.get(name, str(wanted[name])), name
