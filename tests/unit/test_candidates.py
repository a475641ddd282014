"""`choice_for`: the candidates of `auto`."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from commlayer import Policy
from commlayer.compress.choice import Choice
from commlayer.frontend.gradients.candidates import AUTO, LOW_RANK, choice_for

WEIGHTS = [torch.nn.Parameter(torch.zeros(3))]


class Group:
    def __init__(self, host_count: int) -> None:
        self.host_count = host_count


def choice_of(
    policy: Policy, optimizer: Any = None, others: Sequence[float] = (), hosts: int = 4, partial: bool = False
) -> Choice:
    """The choice on a rank; `others` are the largest values of the other ranks."""
    group: Any = Group(hosts)

    def agree(own: Sequence[float]) -> list[float]:
        return [max(a, b) for a, b in zip(own, others or [0.0] * len(own), strict=True)]

    return choice_for(group, policy, optimizer, agree, partial=partial)


def names(choice: Choice) -> list[str]:
    return [candidate.codec for candidate in choice.candidates]


def test_codecs_that_keep_errors_need_permission() -> None:
    choice = choice_of(Policy(codec="auto"))
    assert names(choice) == ["none", "bf16", "int8", "int4-int8"]
    assert set(choice.unavailable) == {"int4", LOW_RANK, "sign"}
    assert choice.unavailable[LOW_RANK] == "needs Policy(allow_state=True)"


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (None, "HookState(optimizer=...) is not given"),
        (torch.optim.AdamW(WEIGHTS), "AdamW averages squared gradients"),
    ],
)
def test_sign_is_left_out_where_the_optimizer_cannot_use_it(optimizer: Any, reason: str) -> None:
    choice = choice_of(Policy(codec="auto", allow_state=True), optimizer)
    assert names(choice) == ["none", *AUTO[:-1]]
    assert choice.unavailable == {"sign": reason}


def test_sign_comes_last_and_late() -> None:
    policy = Policy(codec="auto", allow_state=True, exact_steps=7)
    choice = choice_of(policy, torch.optim.SGD(WEIGHTS, lr=0.1))
    assert names(choice) == ["none", *AUTO]
    assert [candidate.begins for candidate in choice.candidates] == [0] * 5 + [7, 7]
    assert [candidate.steps > 1 for candidate in choice.candidates] == [False] * 5 + [True, True]
    assert all(candidate.coding_s > 0 for candidate in choice.candidates[1:])


def test_all_ranks_have_the_largest_times_and_the_fewest_codecs() -> None:
    policy = Policy(codec="auto", allow_state=True)
    choice = choice_of(policy, torch.optim.SGD(WEIGHTS, lr=0.1), others=[1.0, *range(10, 16)])
    assert names(choice) == ["none", *AUTO[:-1]]
    assert [candidate.coding_s for candidate in choice.candidates] == [0, 10, 11, 12, 13, 14]
    assert choice.unavailable == {"sign": "another rank has no optimizer for it"}


def test_two_hosts_send_contributions_only_unless_these_may_be_lost() -> None:
    def bytes_of(codec: str, hosts: int, *, partial: bool) -> float:
        choice = choice_of(Policy(codec="auto"), hosts=hosts, partial=partial)
        return next(candidate.bytes_per_value for candidate in choice.candidates if candidate.codec == codec)

    pair = bytes_of("int4-int8", 2, partial=False)
    assert pair < 0.7 * bytes_of("int4-int8", 2, partial=True)
    assert bytes_of("int4-int8", 2, partial=True) == bytes_of("int4-int8", 4, partial=False)
    assert bytes_of("bf16", 2, partial=False) == bytes_of("bf16", 4, partial=False)
