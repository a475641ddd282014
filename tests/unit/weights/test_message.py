import json

import pytest

from commlayer.weights.message import Head

HEAD = Head(7, "life", 12, "digest", "layout", 11)


def test_a_head_comes_back() -> None:
    assert Head.read(HEAD.text()) == HEAD


@pytest.mark.parametrize(
    "change",
    [
        {"request": "7"},
        {"version": -2},
        {"version": 1 << 63},
        {"version": True},
        {"digest": 3},
        {"life": None},
        {"base": 1.5},
        {"protocol": 1},
        {"more": 1},
    ],
)
def test_other_heads_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Head.read(json.dumps(json.loads(HEAD.text()) | change).encode())


def test_other_bytes_are_refused() -> None:
    for text in (b"", b"{}", b"[]", b"\xff", b"[" * 60_000, b" " * 70_000 + HEAD.text()):
        with pytest.raises(ValueError, match=r"."):
            Head.read(text)
