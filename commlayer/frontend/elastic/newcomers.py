"""Processes that ask to join a job, through its Store.

A job that takes newcomers shows what they must have (`SETTINGS`), and who its members are (`ROSTER`). A newcomer
compares the settings by itself, takes a number, and writes where it runs. A member invites it at the end of a step.
Then it finds the roster of the WORLD that is to be made.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...config import Config, shared
from ...errors import ClosedError, CommError, ConfigError, OperationTimeoutError, PeerLostError
from ...transport.log import log
from ...transport.secret import fingerprint, read_secret
from ...transport.store_link import connection, limit, root_of
from ..group.party import Place
from .world import JOB, World

LOOK_S = 0.1
"""Pause between two looks for newcomers, on the member that invites them."""

PAUSE_S = 0.005
"""Pause of a newcomer between two looks for an answer."""

ALIVE_S = 1.0
"""The same, between two looks whether a member lives."""

TOLD = 200
"""Characters of a setting that an error quotes."""

SETTINGS, ROSTER, FIRST, COUNT, ENDED = "settings", "roster", "first", "count", "ended"


def settings_of(own: Mapping[str, Any], token: str) -> dict[str, Any]:
    """`own`, and what all ranks of any job must have alike; as JSON has it."""
    config = Config.from_environment()
    found = {
        "torch": torch.__version__,
        **{str(name): value for name, value in (config.common() | shared()).items()},
        "the secret (COMMLAYER_SECRET_FILE)": fingerprint(read_secret(config.secret_file), token),
        **own,
    }
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


class Newcomers:
    """Those that wait, as a thread of a member sees them: a Store that does not answer keeps no step waiting."""

    def __init__(self, world: World) -> None:
        self._root, self._token, self._silence_s = world.root, world.token, world.silence_s
        self._store = world.store("newcomers")
        self.invites = False
        """Whether this member is the one that looks."""
        self._waiting: dict[int, Place] = {}
        self._lock = threading.Lock()
        self._admitted: set[int] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-newcomers", daemon=True)

    def open(self, settings: Mapping[str, Any], roster: str, size: int) -> None:
        """From now on, processes may ask. `size`: ranks at the start of the job."""
        self._store.set(SETTINGS, json.dumps(settings))
        self._store.set(ROSTER, roster)
        self._store.set(FIRST, str(size))
        self._store.compare_set(COUNT, "", str(size))  # the first of them gets this number
        self._root.set(JOB, self._token)
        self._thread.start()

    def waiting(self) -> dict[int, Place]:
        """Those that wait now, and where they run. Raises RuntimeError without a Store."""
        with self._lock:
            found = {number: place for number, place in self._waiting.items() if number not in self._admitted}
        return {number: place for number, place in found.items() if not self._store.check([f"answer {number}"])}

    def follow(self) -> None:
        """For a member that has joined: watches, too."""
        self._thread.start()

    def places(self, newcomers: Collection[int]) -> dict[int, Place]:
        """Where they run."""
        return {number: _place(self._store.get(f"{number}")) for number in newcomers}

    def admit(self, newcomers: Collection[int], roster: str) -> None:
        """Tells them, and those that will ask, the members of the next WORLD."""
        self._store.set(ROSTER, roster)
        for number in newcomers:
            self._store.set(f"answer {number}", roster)
        with self._lock:
            self._admitted |= set(newcomers)

    def close(self, *, ended: bool) -> None:
        """No more are taken. `ended`: by no member of the job."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        if ended:
            try:
                self._store.set(ENDED, "")
            except RuntimeError as error:
                log.warning("processes that wait to join do not learn that the job has ended: %s", error)

    def _run(self) -> None:
        try:
            store, seen = connection(self._store, self._silence_s), set()
            while not self._stopped.wait(LOOK_S):
                if not self.invites:
                    continue
                for number in range(int(store.get(FIRST)), store.add(COUNT, 0)):
                    if number not in seen and store.check([f"{number}"]):
                        seen.add(number)
                        if not store.check([f"answer {number}"]):  # who has one is a member, or has withdrawn
                            with self._lock:
                                self._waiting[number] = _place(store.get(f"{number}"))
        except RuntimeError as error:
            log.warning("nobody can join this job any more: its Store does not answer: %s", error)


def ask(
    given: dist.Store,
    describe: Callable[[str], Mapping[str, Any]],
    place: Place,
    timeout_s: float,
    wait_s: float,
) -> World:
    """Waits until a job takes this process in; returns the WORLD that is to be made.

    `describe` returns the settings by the job's token. Raises ConfigError, which names them, if some differ from the
    job's; ClosedError if the job has ended, PeerLostError if it has died, OperationTimeoutError after `wait_s` without
    a job, or without an answer.
    """
    root, end_s = root_of(given), time.monotonic() + wait_s
    limit(root, timeout_s)
    try:
        while not root.check([JOB]):
            _pause(end_s, f"no job on this Store took ranks within {wait_s:g} s (job.sampler() makes it one)")
        token = root.get(JOB).decode()
        world = World(root, token, -1, place, timeout_s)
        store = world.store("newcomers")
        if text := difference(describe(token), json.loads(store.get(SETTINGS)), "here", "in the job"):
            raise ConfigError(f"this process cannot join: {text}; start it as the job's ranks were started")
        world.name(int(store.add(COUNT, 1)) - 1)
        world.pulse.beat()
        store.set(f"{world.own}", json.dumps(place))
        try:
            _wait(world, store, end_s, wait_s)
        except BaseException:
            store.compare_set(f"answer {world.own}", "", "withdrawn")  # else the members would wait for this process
            raise
        return world
    except CommError:
        raise
    except RuntimeError as error:
        raise CommError(f"the job's Store does not answer: look at the process that serves it. ({error})") from error


def _wait(world: World, store: Any, end_s: float, wait_s: float) -> None:
    """Until the answer is there."""
    look_s = 0.0
    while not store.check([f"answer {world.own}"]):
        if store.check([ENDED]):
            raise ClosedError("the job has ended, or is about to end, and takes no ranks any more")
        if time.monotonic() > look_s:
            look_s = time.monotonic() + ALIVE_S
            world.follow(store.get(ROSTER).decode())
            if world.dead(world.members) == set(world.members):
                raise PeerLostError(f"all ranks of the job ({world.members}) have died; start it again")
        _pause(end_s, f"the job did not take this process in within {wait_s:g} s; look at its log")
    world.follow(store.get(f"answer {world.own}").decode())


def _pause(end_s: float, text: str) -> None:
    if time.monotonic() > end_s:
        raise OperationTimeoutError(text)
    time.sleep(PAUSE_S)


def difference(one: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str) -> str:
    """The first setting that differs, as text; empty: they are alike. `here`, `there`: whose they are."""
    for name in dict.fromkeys([*one, *other]):
        ours, theirs = one.get(name, "not set"), other.get(name, "not set")
        if theirs == ours:
            continue
        if isinstance(theirs, dict) and isinstance(ours, dict):
            part = next(each for each in [*ours, *theirs] if theirs.get(each) != ours.get(each))
            name, ours, theirs = f"{name} ({part})", ours.get(part, "missing"), theirs.get(part, "missing")
        return f"{name} is {_told(ours)} {here} and {_told(theirs)} {there}"
    return ""


def _told(value: Any) -> str:
    text = str(value) or repr(value)
    return text if len(text) <= TOLD else f"{text[:TOLD]}..."


def _place(text: bytes) -> Place:
    host, process = json.loads(text)
    return str(host), int(process)
