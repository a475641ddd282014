import json
import re

import pytest

from commlayer.weights.message import Head, Plan, Want
from commlayer.weights.parts import PUBLISHER

HEAD = Head(7, "life", 12, "digest", "layout", 11)
PLAN = Plan("name", ["10.0.0.1:29600", PUBLISHER], 3)
WANT = Want(7, "name", 1, 2, 3, 40, "it was late")


def test_a_head_comes_back() -> None:
    assert Head.read(HEAD.text()) == HEAD
    assert Head.read(Head(0).text()) == Head(0)


def test_a_plan_and_a_want_come_back() -> None:
    assert Plan.read(PLAN.text()) == PLAN
    assert PLAN.is_shared
    assert not Plan("", [PUBLISHER]).is_shared
    assert Want.read(WANT.text()) == WANT


def check_refused(message: Head | Plan | Want, change: dict[str, object], why: str = "") -> None:
    """By default, the reason is the value of the field that has changed."""
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=re.escape(why or f"{name} is {value!r}")):
        type(message).read(json.dumps(json.loads(message.text()) | change).encode())


@pytest.mark.parametrize("change", [{"sources": [1]}, {"sources": "a"}, {"deal": -1}, {"name": 1}])
def test_other_plans_are_refused(change: dict[str, object]) -> None:
    check_refused(PLAN, change)


def test_plans_without_a_seat_are_refused() -> None:
    check_refused(PLAN, {"sources": []}, "a plan without sources")
    check_refused(PLAN, {"sources": ["10.0.0.1:29600"]}, "a deal without a seat of the reader's own")


@pytest.mark.parametrize("change", [{"seat": -1}, {"at": -1}, {"request": -1}, {"deal": None}, {"why": 1}])
def test_other_wants_are_refused(change: dict[str, object]) -> None:
    check_refused(WANT, change)
    check_refused(WANT, {"seat": 2}, "seat 2 of 2")


@pytest.mark.parametrize(
    "change",
    [
        {"request": "7"},
        {"request": -1},
        {"tags_bytes": -1},
        {"version": -1},
        {"base": -2},
        {"version": 1 << 63},
        {"version": True},
        {"digest": 3},
        {"life": None},
        {"base": 1.5},
        {"address": None},
    ],
)
def test_other_heads_are_refused(change: dict[str, object]) -> None:
    check_refused(HEAD, change)


def test_heads_of_other_releases_are_refused() -> None:
    check_refused(HEAD, {"protocol": 2}, "(messages of version 2)")
    check_refused(HEAD, {"more": 1}, "not a message of this release")


def test_other_bytes_are_refused() -> None:
    for text, why in (
        (b"", "Expecting value"),
        (b"{}", "not a message of this release"),
        (b"[]", "not a message of this release"),
        (b"\xff", "decode"),
        (b"[" * 60_000, "nested too deeply"),
        (b" " * 70_000 + HEAD.text(), "not a message of this release"),  # too long
    ):
        with pytest.raises(ValueError, match=why):
            Head.read(text)
