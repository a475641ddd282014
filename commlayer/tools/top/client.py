"""`Client`: asks the collector of a running job, with the job's key."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...telemetry import curve
from ...telemetry.collector import CHANGE, RESULT, VIEW

ANSWER_S = 5.0
"""Longest wait for an answer."""

LOOK_S = 2.0
"""Time between two looks whether the job is still there, or has another key, while no answer comes."""

Door = tuple[str, bytes]
"""The address of a collector, and the key of its job, with its secret mixed in."""


class NoAnswerError(RuntimeError):
    """The collector does not answer."""


class Client:
    """A connection to the collector of a job. `find` returns where it is now: a job that goes on with other ranks
    (`commlayer.elastic`) has another key, and maybe another address. None: it stays at `door`."""

    def __init__(self, door: Door, find: Callable[[], Door] | None = None) -> None:
        """Raises ConfigError if pyzmq is missing, or the address is none."""
        self._zmq = curve.load()
        self._find = find
        self._context = self._zmq.Context()
        self._connect(door)

    def _connect(self, door: Door) -> None:
        self._door = door
        address, key = door
        endpoint = curve.endpoint(address)
        self._socket = curve.client(self._context, key)
        self._socket.connect(endpoint)

    def follow(self) -> bool:
        """Connects to the place where the job is now. Whether that is another one than before."""
        try:
            door = self._door if self._find is None else self._find()
        except (RuntimeError, ValueError):  # its Store does not answer
            return False
        if door == self._door:
            return False
        self._socket.close(linger=0)
        self._connect(door)
        return True

    def view(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The latest samples of all ranks, as `collector.Samples.view` gives them. Raises NoAnswerError."""
        found: dict[str, Any] = json.loads(self.ask([VIEW], timeout_s)[1])
        return found

    def ask(self, message: list[bytes], timeout_s: float = ANSWER_S) -> list[bytes]:
        """The answer to a message: its kind, and the rest. `timeout_s`: of each place where the job is meanwhile.
        Raises NoAnswerError."""
        while self._socket.poll(0):  # an answer that came too late
            self._socket.recv_multipart()
        self._socket.send_multipart(message)
        end_s = time.monotonic() + timeout_s
        while not self._socket.poll(1e3 * min(LOOK_S, timeout_s)):
            if self.follow():
                self._socket.send_multipart(message)
                end_s = time.monotonic() + timeout_s
            elif time.monotonic() >= end_s:
                raise self._silence(timeout_s)
        answer: list[bytes] = self._socket.recv_multipart()
        return answer

    def change(self, asked: Mapping[str, Any], timeout_s: float, wait: Callable[[float], None]) -> dict[str, Any]:
        """The result of a change, which the job drops after `timeout_s`. `wait` gets the seconds passed so far, at each
        look. Raises NoAnswerError, soon after the job has ended."""
        begin_s = heard_s = time.monotonic()
        self._socket.send_multipart([CHANGE, json.dumps(asked).encode()])
        while heard_s < begin_s + timeout_s + ANSWER_S:
            if self._socket.poll(LOOK_S * 1e3):
                kind, text = self._socket.recv_multipart()
                heard_s = time.monotonic()
                if kind == VIEW:
                    continue
                if kind != RESULT:
                    raise NoAnswerError(text.decode())
                found: dict[str, Any] = json.loads(text)
                return found
            now_s = time.monotonic()
            if now_s > heard_s + ANSWER_S:
                break
            self._socket.send_multipart([VIEW])
            wait(now_s - begin_s)
        raise self._silence(time.monotonic() - heard_s)

    def _silence(self, seconds: float) -> NoAnswerError:
        return NoAnswerError(
            f"{self._door[0]} has not answered for {seconds:.1f} s: the job has ended, or it has another key (a "
            f"restart makes a new one; a COMMLAYER_SECRET_FILE changes it), or a firewall is in between"
        )

    def close(self) -> None:
        """Ends the connection."""
        self._context.destroy(linger=0)
