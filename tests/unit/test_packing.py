"""A state becomes one array of bytes and back, with all that is in it; errors of the thread are not lost."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from commlayer.frontend.group.packing import Packing, unpack


def test_a_state_comes_back() -> None:
    state: dict[str, Any] = {
        "a": torch.randn(3, 5)[:, ::2],
        "b": [torch.tensor(7), {1: torch.ones(2, dtype=torch.bfloat16), "none": None}],
        "c": torch.zeros(0, 4, dtype=torch.float64),
        "d": (torch.arange(5, dtype=torch.uint8), torch.tensor([True, False])),
        "e": collections.OrderedDict(x=1.5, y="text", z=torch.randn(7, dtype=torch.complex64)),
        "f": torch.nn.Parameter(torch.randn(2, 3)),
    }
    found = unpack(Packing(state).packed().clone())
    assert list(found) == list(state)
    for mine, theirs in [
        (state["a"], found["a"]),
        (state["b"][0], found["b"][0]),
        (state["b"][1][1], found["b"][1][1]),
        (state["c"], found["c"]),
        *zip(state["d"], found["d"], strict=True),
        (state["e"]["z"], found["e"]["z"]),
        (state["f"], found["f"]),
    ]:
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine, theirs)
    assert (found["b"][1]["none"], found["e"]["x"], found["e"]["y"]) == (None, 1.5, "text")
    assert torch.equal(unpack(Packing({}).packed()).get("a", torch.ones(1)), torch.ones(1))


def test_the_head_is_of_the_moment_and_the_tensors_are_of_the_end() -> None:
    numbers = {"rate": 0.5, "values": torch.zeros(4)}
    packing = Packing(numbers)
    numbers["rate"] = 0.1
    assert unpack(packing.packed())["rate"] == 0.5
    assert packing.is_done


def test_an_error_of_the_thread_is_raised() -> None:
    packing = Packing({"values": torch.ones(3).to_sparse()})
    with pytest.raises(RuntimeError):
        packing.packed()
