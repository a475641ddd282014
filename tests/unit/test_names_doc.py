"""docs/names.md gives a reason for every public name and setting, and has no row of one that is gone."""

from typing import Any

import pytest

import commlayer
from commlayer import planner, scheduler
from commlayer.config import SECTIONS, rows
from tests.documents import table

NAMES = {
    "Names of commlayer": commlayer.__all__,
    "Names of the planner": planner.__all__,
    "Names of the scheduler": scheduler.__all__,
}
SETTINGS = {
    "Settings of a process": "process",
    "Fields of a policy": "policy",
    "Settings of unchanged DDP models": "ddp",
}


def reasons(heading: str) -> dict[str, str]:
    return dict(table("names.md", heading)[1:])


@pytest.mark.parametrize("heading", NAMES)
def test_every_name_has_a_reason(heading: str) -> None:
    found = reasons(heading)
    assert list(found) == list(NAMES[heading])
    assert all(found.values())


@pytest.mark.parametrize("heading", SETTINGS)
def test_every_setting_has_a_reason(heading: str) -> None:
    found, kind = reasons(heading), SECTIONS[SETTINGS[heading]]
    own: list[Any] = [row.name for row in rows(kind)]
    assert list(found) == own
    assert all(found.values())
