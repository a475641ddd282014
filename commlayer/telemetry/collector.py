"""`Collector`: keeps the latest sample of each rank at rank 0, and answers viewers.

It checks samples as they enter (`entry.py`), and hands them on as they came.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import CommError
from ..transport.log import log
from . import curve, entry
from .ballot import Ballot
from .control import Change, parse

SAMPLE, END, VIEW, REFUSED = b"sample", b"end", b"view", b"refused"
CHANGE, ANSWER, APPLIED, DROP, RESULT = b"change", b"answer", b"applied", b"drop", b"result"
"""Kinds of messages: the first part of each."""

POLL_S = 0.2
BIND_S = 1.0
"""Time between two tries to take the port: the process before may still have it."""

SILENT_S = 5.0
"""A rank without a sample for so long takes no changes."""

CHANGE_MAX_S = 600.0
"""Longest time that a change may wait."""

VISITORS = 64
"""Connections beside those of the ranks: viewers, and strangers whose handshake has not failed yet."""


class Samples:
    """The latest samples, by rank. `world`: the number of ranks."""

    def __init__(self, world: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._world = world
        self._clock = clock
        self._latest: dict[int, tuple[float, bytes]] = {}
        self._ended: set[int] = set()

    def put(self, rank: int, sample: bytes) -> None:
        """A rank's sample, as JSON."""
        self._latest[rank] = self._clock(), sample
        self._ended.discard(rank)

    def missing(self, silent_s: float) -> list[int]:
        """The ranks that have left, or have been silent for so long, and those without a sample."""
        now_s = self._clock()
        ages = {rank: now_s - at_s for rank, (at_s, _) in self._latest.items()}
        live = {rank for rank, age_s in ages.items() if age_s <= silent_s} - self._ended
        return sorted(set(range(self._world)) - live)

    def ranks(self) -> frozenset[int]:
        """The ranks that have sent samples, and have not left."""
        return frozenset(self._latest.keys() - self._ended)

    def end(self, rank: int) -> None:
        """The rank has left the job."""
        self._ended.add(rank)

    def view(self) -> bytes:
        """All samples with their ages in seconds, and the ranks that have left, as JSON."""
        now_s = self._clock()
        ages = {str(rank): round(now_s - at_s, 3) for rank, (at_s, _) in self._latest.items()}
        head = json.dumps({"ages": ages, "ended": sorted(self._ended)})[:-1]
        return head.encode() + b', "samples": [' + b",".join(sample for _, sample in self._latest.values()) + b"]}"


class Collector:
    """Serves one address in a thread of its own. `key`: of the job. `world`: the number of its ranks. `is_one_host`:
    whether all of them are on this host, so that only programs of this host need to reach it."""

    def __init__(self, address: str, key: bytes, world: int, *, is_one_host: bool = False) -> None:
        self._address = address
        self._key = key
        self._world = world
        self._is_one_host = is_one_host
        self.samples = Samples(world)
        self._agents: dict[int, bytes] = {}
        self._ballot: Ballot | None = None
        self._number = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-top-collector", daemon=True)

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        zmq = curve.load()
        with _context(zmq) as context:
            gate = curve.Gate(context, self._key)
            door = self._opened(context)
            if door is None:
                gate.socket.close()
                return
            poller = zmq.Poller()
            for socket in (door.router, door.news, gate.socket):
                poller.register(socket, zmq.POLLIN)
            while not self._stop.is_set():
                ready = dict(poller.poll(POLL_S * 1e3))
                door.look()
                if gate.socket in ready:
                    gate.answer()
                if door.router in ready:
                    self._hear(door.router, door.router.recv_multipart())
                self._count(door.router)
            door.close()
            gate.socket.close()

    def _opened(self, context: Any) -> curve.Door | None:
        """The server's socket. None if the collector was stopped before the port was free."""
        zmq = curve.load()
        is_told = False
        room = 2 * self._world + VISITORS  # ranks that start again come before the end of their former connections
        endpoint = curve.endpoint(self._address, bind=True, is_one_host=self._is_one_host)
        while not self._stop.is_set():
            router = curve.server(context, self._key, entry.SAMPLE_MAX_BYTES)
            try:
                return curve.Door(router, endpoint, room)
            except zmq.ZMQError as error:
                if not is_told:
                    log.warning(
                        "COMMLAYER_TOP: rank 0 cannot listen on %s yet: %s; use a free port, and an address of this "
                        "host",
                        self._address,
                        error.strerror,
                    )
                is_told = True
                self._stop.wait(BIND_S)
        return None

    def _hear(self, router: Any, message: list[bytes]) -> None:
        """Takes a message, or refuses one of another version, or of another program with the job's key."""
        try:
            self._take(router, message)
        except (ValueError, OverflowError, TypeError) as error:
            router.send_multipart([message[0], REFUSED, f"malformed: {error}".encode()])

    def _take(self, router: Any, message: list[bytes]) -> None:
        """A message of an agent or of a viewer."""
        sender, kind, *parts = message
        if kind == END and len(parts) == 1:
            self.samples.end(self._rank(parts[0]))
        elif kind == SAMPLE and len(parts) == 2:
            rank = self._rank(parts[0])
            entry.check_sample(parts[1], rank, self._world)
            self._agents[rank] = sender
            self.samples.put(rank, parts[1])
        elif kind in (ANSWER, APPLIED) and len(parts) == 3:
            self._report(kind, self._rank(parts[0]), int(parts[1]), parts[2].decode())
        elif kind == CHANGE and len(parts) == 1:
            refusal = self._propose(router, sender, parts[0])
            if refusal:
                router.send_multipart([sender, RESULT, json.dumps({"applied": False, "error": refusal}).encode()])
        elif kind == VIEW:
            router.send_multipart([sender, VIEW, self.samples.view()])
        else:
            router.send_multipart([sender, REFUSED, b"this version of commlayer does not know the message"])

    def _rank(self, text: bytes) -> int:
        """A rank of the job. Raises ValueError for anything else."""
        if not text.isdigit() or len(text) > len(str(self._world)) or int(text) >= self._world:
            raise ValueError(f"no rank of a job of {self._world}")
        return int(text)

    def _propose(self, router: Any, asker: bytes, text: bytes) -> str:
        """Offers a change to all ranks, or returns the reason not to."""
        try:
            asked = entry.read(text)
            seconds = float(asked.get("timeout_s", 60.0))
            self._number = max(self._number + 1, int(time.time() * 1e3))  # grows over restarts of rank 0
            change = Change.read(json.dumps({**asked, "number": self._number}).encode())
            parse(change.name, str(change.value))
        except (ValueError, OverflowError, AttributeError, TypeError, CommError) as error:
            return str(error)
        if self._ballot is not None:
            return f"{self._ballot.change.name} is under way; try again when it has ended"
        missing = self.samples.missing(SILENT_S)
        if missing or not self.samples.ranks():
            return f"no sample from rank {', '.join(map(str, missing[:8])) or '0'}; all ranks must take part"
        self._ballot = Ballot(
            change, asker, self.samples.ranks(), time.monotonic() + min(max(seconds, 0.0), CHANGE_MAX_S)
        )
        self._tell(router, [CHANGE, change.text()])
        return ""

    def _report(self, kind: bytes, rank: int, number: int, text: str) -> None:
        """What an agent says of a change."""
        if self._ballot is None or self._ballot.change.number != number:
            return
        if kind == ANSWER:
            self._ballot.answer(rank, text)
        else:
            self._ballot.steps[rank] = int(text)

    def _count(self, router: Any) -> None:
        """Ends the ballot that has a result."""
        ballot = self._ballot
        result = None if ballot is None else ballot.result()
        if ballot is None or result is None:
            return
        if not result["applied"]:
            self._tell(router, [DROP, str(ballot.change.number).encode()])
        router.send_multipart([ballot.asker, RESULT, json.dumps({**result, "name": ballot.change.name}).encode()])
        self._ballot = None

    def _tell(self, router: Any, message: list[bytes]) -> None:
        """Sends a message to all agents."""
        for agent in self._agents.values():
            router.send_multipart([agent, *message])


@contextlib.contextmanager
def _context(zmq: Any) -> Iterator[Any]:
    context = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)
