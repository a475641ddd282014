"""Handles of processes: their text, and the members that a list or a set of them gives."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.frontend.group.gathering import MemberHandle, members_of

OWN = MemberHandle.own(1, "store")
HANDLES = st.builds(
    MemberHandle, st.integers(0), st.none() | st.integers(), st.text(), st.integers(1), st.text(), st.text(), st.text()
)


@given(HANDLES)
def test_the_text_of_a_handle_has_all_of_it(handle: MemberHandle) -> None:
    assert MemberHandle.read(str(handle)) == handle


@given(
    st.text()
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: f"commlayer:{json.dumps(v)}")
)
def test_any_other_text_is_an_error(text: str) -> None:
    try:
        assert str(MemberHandle.read(text))
    except ValueError:
        with pytest.raises(ConfigError, match="no handle of commlayer"):
            members_of([str(OWN), text], OWN)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_list_gives_the_ranks_and_a_set_keeps_their_order(ranks: list[int], draw: object) -> None:
    others = [dataclasses.replace(OWN, rank=rank, life=f"life {place}") for place, rank in enumerate(ranks)]
    members = [*others, OWN]
    draw.shuffle(members)  # type: ignore[attr-defined]
    texts = [str(member) for member in members]
    assert members_of(texts, OWN) == members
    ordered = members_of(set(texts), OWN)
    assert sorted(ordered, key=str) == sorted(members, key=str)
    assert [member.rank for member in ordered] == sorted(member.rank for member in members)
    assert members_of(frozenset(reversed(texts)), OWN) == ordered
