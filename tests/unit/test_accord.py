"""Processes that all must propose the same agree, or all get one error. `test_exclusion.py` has more."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from commlayer.errors import CommError, MismatchError, OperationTimeoutError, PeerLostError
from commlayer.transport.accord import Accord, Verdict, store_errors


def settle(store: Any, rank: int, proposal: str, size: int, timeout_s: float, dead: Sequence[int] = ()) -> Verdict:
    def obstacle() -> Verdict | None:
        return Verdict.against(PeerLostError, f"{dead}", dead[0]) if dead else None

    accord = Accord(store, "a/", rank, range(size))
    return accord.settle(
        proposal, lambda _, other: f"{proposal} not {other}", obstacle, lambda who: f"{who}", timeout_s
    )


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(["x", "y y"]), min_size=1, max_size=4), st.booleans())
def test_all_have_one_verdict(proposals: list[str], one_is_absent: bool) -> None:
    store, size = HashStore(), len(proposals) + one_is_absent
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(settle, store, rank, text, size, 0.2) for rank, text in enumerate(proposals)]
        found = {each.result(30) for each in asked}
    assert len(found) == 1
    verdict = found.pop()
    if len(set(proposals)) > 1:
        assert verdict.kind in (MismatchError, OperationTimeoutError)
    elif one_is_absent:
        assert (verdict.kind, verdict.text, verdict.culprit) == (OperationTimeoutError, f"[{size - 1}]", size - 1)
    else:
        assert (verdict.kind, verdict.agreed) == (None, proposals[0])


def test_an_obstacle_ends_it_and_who_comes_later_learns_it() -> None:
    store = HashStore()
    told = settle(store, 0, "x", 3, 30, dead=[2])
    assert (told.kind, told.culprit) == (PeerLostError, 2)
    assert settle(store, 1, "x", 3, 30) == told
    accord = Accord(store, "a/", 1, range(3))
    assert (accord.verdict(), accord.proposal(), accord.has_come(1), accord.has_come(2)) == (told, "x", True, False)


def test_before_anybody_comes_there_is_nothing() -> None:
    accord = Accord(HashStore(), "a/", 0, range(2))
    assert (accord.verdict(), accord.proposal(), accord.has_come(0)) == (None, "", False)


def test_errors_of_the_store_say_so() -> None:
    with pytest.raises(CommError, match=r"^rank 3: the job's Store does not answer.*\(gone\)"):  # noqa: SIM117
        with store_errors(lambda text: CommError(f"rank 3: {text}")):
            raise RuntimeError("gone")
    with pytest.raises(PeerLostError, match=r"^mine$"), store_errors(CommError):
        raise PeerLostError("mine")
