"""Inquiries: the ranks of a failed group agree on the culprit, and tell each other their calls."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.transport import inquiry
from commlayer.transport.call import Call, Calls, Exchanged
from commlayer.transport.inquiry import Inquiry, Verdict

JOB_RANKS = [10, 11, 12, 13]
"""The numbers in the job of the ranks of the group."""

Ask = Callable[[Inquiry, Call | None], Verdict | None]


def reduction(count: int) -> Call:
    return Call.of("all_reduce", [torch.ones(count)], [], reduction="SUM")


def inquire(history: Sequence[Sequence[Call]], ask: Ask, silent: Sequence[int] = ()) -> list[Verdict | None]:
    """The verdict of every rank. `history` has the calls of each, of which the last one failed; `silent` ranks do not
    take part."""
    store: Any = dist.HashStore()

    def of_rank(rank: int) -> Verdict | None:
        calls = Calls()
        for call in history[rank]:
            calls.add(call)
        return ask(Inquiry(store, rank, JOB_RANKS[: len(history)], calls), history[rank][-1] if history[rank] else None)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(of_rank, [rank for rank in range(len(history)) if rank not in silent]))


def mismatch(own: Inquiry, call: Call | None) -> Verdict | None:
    return own.mismatch(call, 0)


def timeout(own: Inquiry, call: Call | None) -> Verdict | None:
    return own.timeout(call, 0, "it timed out")


def test_the_rank_that_differs_is_the_culprit_on_all_ranks() -> None:
    history = [[reduction(5), reduction(7)] for _ in range(3)]
    history.insert(1, [reduction(5), Call.of("broadcast", [torch.ones(3)], [], rank=2)])
    told = "ranks 10, 12, 13 called all_reduce 2 of float32 [7], SUM; rank 11 called broadcast 2 of float32 [3] from "
    assert inquire(history, mismatch) == [Verdict(1, told + "rank 12")] * 4


def test_the_first_difference_counts() -> None:
    """Later calls of a rank that has left one out differ, too."""
    history = [[Call("barrier"), reduction(5)], [reduction(5), Call("barrier")]]
    told = "rank 10 called barrier 1; rank 11 called all_reduce 1 of float32 [5], SUM"
    assert inquire(history, mismatch) == [Verdict(1, told)] * 2


def test_unequal_parts_count_in_the_failed_call_only() -> None:
    def gather(rank: int) -> Call:
        return Call.of("all_gather", [torch.ones(rank + 1)], [])

    told = "rank 10 called all_gather 2 of float32 [1]; rank 11 called all_gather 2 of float32 [2]"
    assert inquire([[gather(rank), gather(rank)] for rank in (0, 1)], mismatch) == [Verdict(1, told)] * 2
    alike = [[gather(rank), reduction(3)] for rank in (0, 1)]
    assert inquire(alike, mismatch) == [Verdict(0, "")] * 2  # as the engine says


def delivery(sent: Sequence[int | None], received: Sequence[int | None], unit_bytes: int = 4) -> Call:
    rows = torch.ones(sum(filter(None, sent)) // 4)
    return Call.of("all_to_all", [rows], [], exchanged=Exchanged(sent, received, "rows", unit_bytes))


def test_a_pair_with_unequal_lengths_is_named_with_both() -> None:
    history = [[delivery([4, 12, 4], [4, 8, 4])], [delivery([8, 4, 4], [8, 4, 4])], [delivery([4, 4, 4], [4, 4, 4])]]
    told = "in all_to_all 1 of float32 [5], rank 10 sends 3 rows to rank 11, which expects 2; make their lengths equal"
    assert inquire(history, mismatch) == [Verdict(0, told)] * 3
    later = [[*calls, reduction(3)] for calls in history]  # a rank that has not seen it there
    assert inquire(later, mismatch) == [Verdict(0, told)] * 3


def test_lengths_in_other_units_and_lengths_that_nobody_has() -> None:
    history = [[delivery([None, 8], [None, None], 8)], [delivery([None, 4], [12, 4], 12)]]
    told = (
        "in all_to_all 1 of float32 [2], rank 10 sends 8 bytes to rank 11, which expects 12; make their lengths equal"
    )
    assert inquire(history, mismatch) == [Verdict(0, told)] * 2


def test_the_rank_in_most_unequal_pairs_is_the_culprit() -> None:
    history = [[delivery([4] * 4, [4, 4, 8, 4])] for _ in range(4)]
    verdicts = inquire(history, mismatch)
    text = verdicts[0].text if verdicts[0] is not None else ""
    assert verdicts == [Verdict(2, text)] * 4
    assert text.endswith("rank 12 sends 1 rows to rank 13, which expects 2; make their lengths equal")
    many = [[delivery([4] * 4, [8] * 4)] for _ in range(4)]
    text = getattr(inquire(many, mismatch)[0], "text", "")
    assert "rank 10 sends 1 rows to rank 13, which expects 2 and 9 more pairs; make" in text


def test_a_rank_whose_other_end_is_silent_tells_its_own_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "ANSWER_LOOKS", 20)
    history = [[delivery([4, 12], [4, 8])], [delivery([8, 4], [4, 8])]]
    told = "this rank sends 2 rows to rank 10 and expects 1, rank 10 has not told its lengths; make their lengths equal"
    assert inquire(history, mismatch, silent=[0]) == [Verdict(0, told)]


def test_another_call_comes_before_unequal_lengths() -> None:
    history = [[delivery([4, 12], [4, 8])], [Call.of("broadcast", [torch.ones(3)], [], rank=0)]]
    told = "rank 10 called all_to_all 1 of float32 [4]; rank 11 called broadcast 1 of float32 [3] from rank 10"
    assert inquire(history, mismatch) == [Verdict(1, told)] * 2


def test_a_message_is_told_with_its_other_end() -> None:
    sent = Call("send", torch.float32, [(5,)], rank=1, tag=7)
    received = Call("receive", torch.float32, (), [(6,)], rank=0, tag=7)
    verdicts = inquire([[sent], [received]], lambda own, call: own.mismatch(call, 0))
    told = "; ".join(
        (
            "rank 10 called send 1 of float32 [5] to rank 11, tag 7",
            "rank 11 called receive 1 of float32 [6] from rank 10, tag 7",
        )
    )
    assert verdicts == [Verdict(0, told)] * 2
    later = [[sent, Call("barrier")], [received]]  # the sender learns of it in another call, and may be the first
    assert inquire(later, lambda own, call: own.mismatch(call, 0)) == [Verdict(0, told)] * 2


def test_a_timeout_of_a_message_names_those_with_other_tags() -> None:
    def message(name: str, other: int, tag: int) -> Call:
        shape = [(5,)]
        sends = name == "send"
        return Call(name, torch.float32, shape if sends else (), () if sends else shape, rank=other, tag=tag)

    history = [
        [message("send", 1, 7), message("send", 1, 8), Call("barrier")],
        [message("receive", 0, 7), message("receive", 0, 9)],
    ]
    verdicts = inquire(history, lambda own, call: timeout(own, call) if call and call.is_message else own.aborted())
    told = "it timed out; rank 10 called send 2 of float32 [5] to rank 11, tag 8: other tags?"
    assert verdicts == [Verdict(0, told)] * 2


@pytest.mark.parametrize("silent", [(2,), ()], ids=["stuck", "behind"])
def test_a_timeout_names_the_ranks_that_did_not_come(silent: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "ANSWER_LOOKS", 200 if silent else 2000)
    monkeypatch.setattr(inquiry, "VERDICT_LOOKS", 2000)
    history = [[reduction(5), reduction(5)] for _ in range(4)]
    behind = reduction(5)
    history[2] = [] if silent else [behind]

    def ask(own: Inquiry, call: Call | None) -> Verdict | None:
        """The rank that is behind hears of the failure: it has not failed itself."""
        return own.aborted() if call is behind else timeout(own, call)

    verdicts = inquire(history, ask, silent)
    assert verdicts == [Verdict(2, "it timed out; rank 12 did not call it")] * (4 - len(silent))


def test_a_timeout_of_ranks_that_all_came() -> None:
    verdicts = inquire([[reduction(5)]] * 2, timeout)
    assert verdicts == [Verdict(0, "it timed out; all ranks have called it")] * 2


def test_an_abort_is_told_with_its_reason() -> None:
    def ask(own: Inquiry, call: Call | None) -> Verdict | None:
        if call is not None:
            return own.aborted()
        own.abort("as the test wants it")
        return None

    assert inquire([[reduction(5)], []], ask)[0] == Verdict(1, "as the test wants it")


def test_an_abort_without_a_verdict_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "VERDICT_LOOKS", 10)
    assert inquire([[reduction(5)]], lambda own, _: own.aborted()) == [None]


@dataclasses.dataclass
class Pauses:
    """A process that is stopped while it talks to the Store: each request takes 10 s on its clock."""

    store: Any
    now_s: float = 0.0

    def __getattr__(self, name: str) -> Any:
        self.now_s += 10.0
        return getattr(self.store, name)


def test_a_pause_of_the_process_loses_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that aborts tells its reason a moment after the others have heard of the abort."""
    store: Any = dist.HashStore()
    paused: Any = Pauses(store)
    monkeypatch.setattr("time.monotonic", lambda: paused.now_s)

    def sleep(_: float) -> None:
        Inquiry(store, 1, JOB_RANKS, Calls()).abort("as the test wants it")

    monkeypatch.setattr("time.sleep", sleep)
    assert Inquiry(paused, 0, JOB_RANKS, Calls()).aborted() == Verdict(1, "as the test wants it")


class FrozenStore:
    """A Store whose process is frozen, and then gone."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool:  # noqa: ARG002  # the names are those of the protocol
        time.sleep(30.0)
        return False

    def get(self, key: str) -> bytes:
        raise RuntimeError(key)

    def add(self, key: str, amount: int) -> int:  # noqa: ARG002
        raise RuntimeError(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:  # noqa: ARG002
        raise dist.DistNetworkError(f"the Store's process is gone, and with it {key}")

    def delete_key(self, key: str) -> bool:
        raise RuntimeError(key)


def test_a_store_that_does_not_answer_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "ANSWER_LOOKS", 10)
    monkeypatch.setattr(inquiry, "VERDICT_LOOKS", 10)
    begin_s = time.monotonic()
    own = Inquiry(FrozenStore(), 0, JOB_RANKS, Calls())
    assert own.mismatch(reduction(5), 1) is None
    assert own.mismatch(reduction(5), 1) is None
    assert time.monotonic() - begin_s < 25.0


def test_a_store_that_is_gone_is_no_error() -> None:
    Inquiry(FrozenStore(), 0, JOB_RANKS, Calls()).abort("for a reason")
