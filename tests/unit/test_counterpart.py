"""Warnings of sends and receives that wait, told by ranks that share a Store."""

import gc
import json
import logging
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.transport import counterpart
from commlayer.transport.call import Call, Calls
from commlayer.transport.counterpart import Counterparts, Questions
from commlayer.transport.places import where

STALL_S = 8.0
PATIENCE_S = 4.0
JOB_RANKS = (10, 11, 12)


class Rank:
    """One rank: its messages, and the questions to its process."""

    def __init__(self, store: Any, rank: int) -> None:
        self.calls = Calls()
        descriptions = [
            {"peer": peer, "life": f"life {peer}", "hostname": f"host{at}"} for at, peer in enumerate(JOB_RANKS)
        ]
        who = f"rank {JOB_RANKS[rank]} of group 'pp'"
        self.messages = Counterparts(lambda: who, "pp", rank, descriptions, self.calls, store)
        self.questions = Questions(store, f"life {JOB_RANKS[rank]}", f"rank {JOB_RANKS[rank]} on host{rank}")
        self.awaits = False

    def call(self, name: str, other: int | None, tag: int = 7, *, ago_s: float = STALL_S, ended: bool = False) -> Call:
        shapes = ([[4]], []) if name == "send" else ([], [[4]])
        call = Call(name, torch.float32, *shapes, rank=other, tag=tag)
        self.calls.add(call)
        call.submitted_s = time.monotonic() - ago_s
        call.ended_s = time.monotonic() if ended else None
        return call

    def follow(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        """The warnings of one look."""
        caplog.clear()
        with caplog.at_level(logging.WARNING, "commlayer"):
            self.awaits = self.messages.follow(STALL_S, PATIENCE_S)
        return caplog.messages

    def answer(self) -> None:
        self.questions.answer({"pp": self.messages})


@pytest.fixture
def job() -> list[Rank]:
    store: Any = dist.HashStore()
    return [Rank(store, rank) for rank in range(len(JOB_RANKS))]


def asked(job: list[Rank], caplog: pytest.LogCaptureFixture, who: int = 0, whom: int = 1) -> str:
    """What rank `who` warns of after rank `whom` has answered."""
    assert job[who].follow(caplog) == []
    assert job[who].awaits
    job[whom].answer()
    (text,) = job[who].follow(caplog)
    assert not job[who].awaits
    assert job[who].follow(caplog) == []  # once
    return text


WAITS = "rank 10 of group 'pp': receive 1 of float32 [4] from rank 11, tag 7 has waited 8 s: "
NOT_CALLED = WAITS + "rank 11 on host1 has not called the matching send; "


def test_a_receive_names_the_rank_that_has_not_sent(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    job[0].call("receive", 1)
    text = asked(job, caplog)
    assert text.startswith(NOT_CALLED + "its main thread is in where (")
    assert f"called by asked ({__file__}:" in text


def test_a_send_names_the_rank_that_does_not_receive(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    job[0].call("send", 2, ago_s=STALL_S + 1)
    text = asked(job, caplog, whom=2)
    told = "rank 10 of group 'pp': send 1 of float32 [4] to rank 12, tag 7 has waited 9 s: rank 12 on host2 has not "
    assert text.startswith(told + "called the matching receive; its main thread is in ")


THE_OTHER = {
    "has called it": (
        [("send", 0, {"ago_s": 3})],
        " has waited 3 s in send 1 of float32 [4] to rank 10, tag 7: the data",
    ),
    "receives, too": (
        [("receive", 0, {})],
        NOT_CALLED + "it waits in receive 1 of float32 [4] from rank 10, tag 7; its",
    ),
    "has sent with another tag": (
        [("send", 0, {"tag": 8, "ended": True})],
        NOT_CALLED
        + "its latest send of the two ranks is send 1 of float32 [4] to rank 10, tag 8; its main thread is in ",
    ),
    "has sent it to another receive": (
        [("send", 0, {"ended": True})],
        WAITS + "the matching send of rank 11 on host1 has ended: has a receive from any rank taken the message?",
    ),
}


@pytest.mark.parametrize(("calls", "told"), THE_OTHER.values(), ids=THE_OTHER)
def test_the_other_rank_is_told(job: list[Rank], caplog: pytest.LogCaptureFixture, calls: Any, told: str) -> None:
    job[0].call("receive", 1)
    for name, other, how in calls:
        job[1].call(name, other, **how)
    text = asked(job, caplog)
    assert text.startswith(WAITS)
    assert told in text


def test_a_rank_that_waits_in_a_collective_instead(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    job[0].call("receive", 1)
    job[1].calls.add(Call("barrier"))
    job[1].call("send", 0, tag=8)
    job[1].calls.collectives[0].submitted_s -= 2 * STALL_S  # the oldest is told
    assert asked(job, caplog).startswith(NOT_CALLED + "it waits in barrier 1; its main thread is in ")


def test_messages_match_in_the_order_of_the_calls(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    job[0].call("receive", 1, ended=True)
    job[0].call("receive", 1)
    job[1].call("send", 0, ended=True)
    job[1].call("send", 2)
    assert "rank 11 on host1 has not called the matching send; it waits in send 2 of" in asked(job, caplog)


def test_a_receive_from_any_rank_matches(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    job[0].call("send", 1)
    job[1].call("receive", 2, ended=True)
    job[1].call("receive", None, tag=8)
    job[1].call("receive", None)
    assert "rank 11 on host1 has waited 8 s in receive 3 of float32 [4] from any rank, tag 7: " in asked(job, caplog)


def test_a_receive_from_any_rank_warns_once(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    call = job[0].call("receive", None)
    told = "rank 10 of group 'pp': receive 1 of float32 [4] from any rank, tag 7 has waited 8 s: no rank has sent a "
    assert job[0].follow(caplog) == [told + "message with this tag"]
    call.ended_s = time.monotonic()
    job[0].call("receive", None)
    assert job[0].follow(caplog) == []
    assert not job[0].awaits


def test_a_rank_that_does_not_answer(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    job[0].call("receive", 1)
    assert job[0].follow(caplog) == []
    (wait,) = job[0].messages._waits.values()
    wait.asked_s -= PATIENCE_S
    told = "rank 11 on host1 does not answer: its process is stopped or has ended, or has left the group"
    assert job[0].follow(caplog) == [WAITS + told]


def test_a_rank_that_has_left_the_group(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    job[0].call("receive", 1)
    job[0].follow(caplog)
    job[1].questions.answer({})
    (text,) = job[0].follow(caplog)
    assert text.startswith(WAITS + "rank 11 on host1 has left group 'pp'; its main thread is in ")


def test_the_end_of_a_wait_is_told(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    call = job[0].call("receive", 1)
    asked(job, caplog)
    call.ended_s = call.submitted_s + 12
    assert job[0].follow(caplog) == ["rank 10 of group 'pp': receive 1 went on after 12 s"]
    call = job[0].call("receive", 1)
    asked(job, caplog)
    call.is_failed = True
    assert job[0].follow(caplog) == []  # the error tells


def test_a_message_that_ends_before_the_answer_is_not_told(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    call = job[0].call("receive", 1)
    job[0].follow(caplog)
    job[1].answer()
    call.ended_s = time.monotonic()
    assert job[0].follow(caplog) == []
    assert job[0].messages._waits == {}


def test_young_messages_are_left_alone(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    job[0].call("receive", 1, ago_s=STALL_S - 1)
    assert job[0].follow(caplog) == []
    assert not job[0].awaits


def test_one_message_for_each_rank_and_direction(
    job: list[Rank], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counterpart, "ASKED_MAX", 3)
    first = [job[0].call("receive", 1), job[0].call("send", 1), job[0].call("receive", 2)]
    for name, other in (("receive", 1), ("send", 1), ("send", 2)):
        job[0].call(name, other)
    job[0].follow(caplog)
    assert [wait.call for wait in job[0].messages._waits.values()] == first


def test_a_question_that_was_never_written_is_passed_over(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    job[0].messages.store.add("commlayer/questions/life 11", 1)  # its rank ended before it wrote the question
    job[0].call("receive", 1)
    job[0].follow(caplog)
    job[1].answer()
    assert job[0].follow(caplog) == []
    job[1].answer()
    assert len(job[0].follow(caplog)) == 1


GOOD = {"group": "pp", "kind": "send", "other": 0, "tag": 7, "ordinal": 1}
MALFORMED = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"null",
    json.dumps({**GOOD, "extra": 1}).encode(),
    json.dumps({"group": "pp"}).encode(),
    json.dumps({**GOOD, "kind": "all_reduce"}).encode(),
    json.dumps({**GOOD, "group": ["pp"]}).encode(),
    json.dumps({**GOOD, "ordinal": "1"}).encode(),
    json.dumps({**GOOD, "ordinal": True}).encode(),
)


def test_malformed_questions_are_skipped(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    store = job[0].messages.store
    for data in MALFORMED:
        number = store.add("commlayer/questions/life 11", 1)
        store.set(f"commlayer/question/life 11/{number}", data)  # type: ignore[arg-type]
    job[0].call("receive", 1)
    job[0].follow(caplog)
    with caplog.at_level(logging.WARNING, "commlayer"):
        job[1].answer()
    (told,) = caplog.messages  # once
    assert told.startswith("rank 11 on host1 skips a malformed question in the Store (")
    (text,) = job[0].follow(caplog)
    assert text.startswith(NOT_CALLED)


def test_an_answer_that_is_no_text_is_told(job: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    job[0].call("receive", 1)
    job[0].follow(caplog)
    (wait,) = job[0].messages._waits.values()
    job[0].messages.store.set(wait.answer_key, b"is\xffhere")  # type: ignore[arg-type]
    assert job[0].follow(caplog) == [WAITS + "is\ufffdhere"]


def test_the_place_of_the_main_thread_is_found_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython would wait for ever if memory were collected while it lists the frames of threads."""
    real, found = sys._current_frames, []

    def frames() -> Any:
        found.append(gc.isenabled())
        return real()

    monkeypatch.setattr(sys, "_current_frames", frames)
    assert "test_counterpart.py" in where()
    assert found == [False]
    assert gc.isenabled()
