"""`fault_of`: whether the groups of all ranks are hosts of equal size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.frontend.gradients.between import FACTORS, NOT_A_MEMBER, UNKNOWN, fault_of


@given(st.integers(1, 5), st.integers(1, 5), st.permutations(range(25)))
def test_hosts_of_equal_size_have_no_fault(hosts: int, per_host: int, ranks: list[int]) -> None:
    groups = [ranks[host * per_host : (host + 1) * per_host] for host in range(hosts)]
    assert fault_of({rank: group for group in groups for rank in group}) == ""


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ({0: [0], 1: [NOT_A_MEMBER]}, "rank 1: it is not a member"),
        ({0: [UNKNOWN], 1: [1]}, "rank 0: torch does not know its group"),
        ({4: [FACTORS], 5: [FACTORS]}, "rank 4: the codec or the restored state"),
        ({0: [0, 1], 1: [0, 1], 2: [2]}, "the group of rank 2 has 1 ranks, and that of rank 0 2"),
        ({0: [0, 1], 1: [1, 0]}, r"rank 0 has a group of the ranks \[0, 1\], and rank 1 one of \[1, 0\]"),
        ({0: [0, 1], 1: [1, 2], 2: [1, 2]}, "and rank 1 one of"),
        ({0: [0, 3], 1: [1]}, r"has rank 3, which is none of the ranks \[0, 1\]"),
    ],
)
def test_other_groups_are_named(groups: dict[int, list[int]], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(fault_of(groups))
