"""`Client`: follows a job that has another key; waits for the result of a change as long as the job answers."""

import json
from collections import deque

import pytest

from commlayer.telemetry.collector import CHANGE, REFUSED, RESULT, VIEW
from commlayer.tools.top import client
from commlayer.tools.top.client import Client, NoAnswerError

ASKED = {"name": "priority", "value": 2, "timeout_s": 60.0}
DONE = {"applied": True, "steps": [8], "ranks": 2}


class Job:
    """The client's socket. It has the answers to come; None: nothing comes for a while."""

    def __init__(self, *answers: list[bytes] | None) -> None:
        self.answers = deque(answers)
        self.sent: list[list[bytes]] = []

    def poll(self, _timeout_ms: float) -> bool:
        if self.answers and self.answers[0] is None:
            self.answers.popleft()
            return False
        return bool(self.answers)

    def recv_multipart(self) -> list[bytes]:
        return self.answers.popleft() or []

    def send_multipart(self, message: list[bytes]) -> None:
        self.sent.append(message)


def client_of(job: Job) -> Client:
    made = Client.__new__(Client)
    vars(made).update(_door=("host:1", b""), _find=None, _socket=job)
    return made


def test_it_waits_while_the_job_answers() -> None:
    job = Job(None, [VIEW, b"{}"], None, [RESULT, json.dumps(DONE).encode()])
    waits: list[float] = []
    assert client_of(job).change(ASKED, 60.0, waits.append) == DONE
    assert job.sent == [[CHANGE, json.dumps(ASKED).encode()], [VIEW], [VIEW]]
    assert len(waits) == 2


def test_it_ends_soon_after_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.05)
    with pytest.raises(NoAnswerError, match=r"host:1 has not answered for [\d.]+ s: the job has ended"):
        client_of(Job()).change(ASKED, 1e9, lambda _: None)


def test_a_job_of_another_version_says_so() -> None:
    with pytest.raises(NoAnswerError, match="does not know the message"):
        client_of(Job([REFUSED, b"this version does not know the message"])).change(ASKED, 60.0, lambda _: None)
