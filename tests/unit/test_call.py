"""Calls: their numbers, sizes and texts."""

import pytest
import torch

from commlayer.transport.call import ORDINALS_KEPT, Call, Calls


def test_collectives_and_messages_count_by_themselves() -> None:
    calls = Calls(kept=3)
    for call in (Call("barrier"), Call("send", tag=0), Call("all_reduce"), Call("receive", tag=3)):
        calls.add(call)
    assert [(call.name, call.sequence, call.is_message) for call in calls.latest] == [
        ("send", 1, True),
        ("all_reduce", 2, False),
        ("receive", 2, True),
    ]
    assert calls.collective_count == 2


def test_a_call_counts_the_bytes_that_this_rank_gives_or_takes() -> None:
    one, two = torch.ones(3, 2, dtype=torch.int16), torch.ones(5, dtype=torch.int16)
    assert Call.of("all_gather", [one], [one, two]).nbytes == 12
    assert Call.of("scatter", [], [two]).nbytes == 10
    assert Call("barrier").nbytes == 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call("barrier"), ""),
        (Call.of("all_reduce", [torch.ones(2, 3)], [], reduction="SUM"), "of float32 [2, 3], SUM"),
        (Call.of("broadcast", [torch.ones(())], [], rank=1), "of float32 [] from rank 5"),
        (Call.of("reduce", [torch.ones(1)], [], rank=0, reduction="MAX"), "of float32 [1] to rank 4, MAX"),
        (
            Call.of("all_to_all", [torch.ones(n, dtype=torch.int64) for n in range(5)], []),
            "of int64 [0], [1], [2] and 2 more",
        ),
        (Call("receive", torch.uint8, (), [(7,)], tag=0), "of uint8 [7] from any rank"),
        (Call("all_reduce", torch.float64, [(7,)], signed=(0.01, "zero")), "of float64 [7], losses (0.01, 'zero')"),
    ],
    ids=lambda value: value.name if isinstance(value, Call) else "",
)
def test_text_of_the_arguments(call: Call, text: str) -> None:
    assert call.arguments(ranks=(4, 5)) == text


def test_numbers_of_messages_are_kept_for_the_latest_tags() -> None:
    calls = Calls()
    for step in range(2 * ORDINALS_KEPT):
        for tag in (0, 1 + step):
            calls.add(Call("send", None, [(1,)], rank=1, tag=tag))
        assert (calls.messages[-2].ordinal, calls.messages[-1].ordinal) == (1 + step, 1)
    assert len(calls._ordinals) == ORDINALS_KEPT
