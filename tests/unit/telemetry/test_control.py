from typing import Any

import pytest

from commlayer.errors import ConfigError
from commlayer.telemetry import control
from commlayer.telemetry.control import Change, Mailbox, check, parse
from commlayer.telemetry.meter import Meter


class Hook:
    """A hook that refuses int4."""

    changed = 0
    steps = 0
    uncounted_bytes = 0
    policy = None

    def changed_policy(self, fields: dict[str, Any]) -> None:
        if fields.get("codec") == "int4":
            raise ConfigError("not int4")


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    made = Meter()
    monkeypatch.setattr(control, "meter", made)
    return made


def test_values_from_the_command_line() -> None:
    assert parse("loss-bound", "0.02") == 0.02
    assert parse("priority", "2") == 2
    assert parse("codec", "int8") == "int8"
    for name, value, error in (
        ("loss-bound", "much", "use a number"),
        ("treatment", "zero", "treatment cannot change in a running job"),
        ("tolerance", "x", "change them there"),
        ("speed", "9", "there is no such change; use one of loss-bound, codec"),
    ):
        with pytest.raises(ConfigError, match=error):
            parse(name, value)


def test_a_change_survives_its_message() -> None:
    change = Change(7, "loss-bound", 0.01)
    assert Change.read(change.text()) == change
    for text, why in (
        (b"{}", "no change: KeyError"),
        (b"[]", "no change: TypeError"),
        (b"no", "Expecting value"),
        (b'{"number": 1}', "no change: KeyError"),
    ):
        with pytest.raises(ValueError, match=why):
            Change.read(text)


def test_a_rank_checks_a_change_for_all_its_hooks(meter: Meter) -> None:
    assert "no communication hook" in check(Change(1, "codec", "int8"))
    hook = Hook()
    meter.hook_steps(hook)
    assert check(Change(1, "codec", "int8")) == ""
    assert check(Change(1, "codec", "int4")) == "not int4"
    assert "no such change" in check(Change(1, "speed", 9))
    assert check(Change(1, "pause", "eth7")) == "pause eth7: its interfaces are none"


def told_by(box: Mailbox) -> list[tuple[int, int]]:
    """Numbers and steps of the changes that are said to be applied."""
    told: list[tuple[int, int]] = []
    box.on_applied = lambda number, step: told.append((number, step))
    return told


def test_a_mailbox_holds_a_change_until_all_hooks_have_it(meter: Meter) -> None:
    hooks = [Hook(), Hook()]
    box, change = Mailbox(), Change(5, "codec", "int8")
    told = told_by(box)
    box.offer(change)
    for hook in hooks:
        meter.hook_steps(hook)
    assert (box.waiting(0), box.waiting(5)) == (change, None)
    hooks[0].changed = 5
    box.applied(change, hooks[0], 8)
    assert (told, box.waiting(0)) == ([], change)
    hooks[1].changed = 5
    box.applied(change, hooks[1], 12)
    assert (told, box.waiting(0)) == ([(5, 12)], None)


def test_a_hook_that_rests_applies_the_changes_when_it_goes_on(meter: Meter) -> None:
    """It is not waited for, and misses none."""
    resting, active = Hook(), Hook()
    box, changes = Mailbox(), [Change(5, "codec", "int8"), Change(6, "priority", 2)]
    told = told_by(box)
    meter.hook_steps(resting)
    for change in changes:
        box.offer(change)
        meter.hook_steps(active)
        assert box.waiting(active.changed) == change
        active.changed = change.number
        box.applied(change, active, change.number)
    assert told == [(5, 5), (6, 6)]
    for change in changes:
        assert box.waiting(resting.changed) == change
        resting.changed = change.number
        box.applied(change, resting, 40)
    assert (told, box.waiting(0)) == ([(5, 5), (6, 6)], None)


def test_a_dropped_change_waits_no_more() -> None:
    box, change = Mailbox(), Change(5, "codec", "int8")
    box.offer(change)
    box.drop(4)
    assert box.waiting(0) == change
    box.drop(5)
    assert box.waiting(0) is None
