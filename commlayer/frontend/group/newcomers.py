"""Processes that ask to join a job, through its Store.

A job that takes newcomers shows what they must have (`SETTINGS`), and who its members are (`ROSTER`). A newcomer
compares the settings by itself, takes a number, and writes where it runs. A member invites it at the end of a step.
Then it finds the roster of the group that is to be made.

Processes that share a model ask as one: each part of that is done by all of them, or by none. Their numbers follow each
other, and they are invited together.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...config import Config, shared
from ...errors import ClosedError, CommError, ConfigError, OperationTimeoutError, PeerLostError
from ...transport.bootstrap import JOB, entry
from ...transport.log import log
from ...transport.native import Engine
from ...transport.secret import fingerprint, read_secret
from ...transport.store_link import connection, limit, root_of
from ...transport.survivors import Verdict
from .party import Party, Place

JOIN_S = 1800.0
"""Longest wait of a process that joins."""

LOOK_S = 0.1
"""Pause between two looks for newcomers, on the member that invites them."""

PAUSE_S = 0.005
"""Pause of a newcomer between two looks for an answer."""

ALIVE_S = 1.0
"""The same, between two looks whether a member lives, and the longest until those that ask with it hear of it."""

TOLD = 200
"""Characters of a setting that an error quotes."""

SETTINGS, ROSTER, FIRST, COUNT, ENDED = "settings", "roster", "first", "count", "ended"

KEY = "key"
"""The entry of a job in the Store whose WORLD stays: processes that make a WORLD of their own replace it there."""

WITHDRAWN = "withdrawn"
"""The answer of a newcomer to itself, when it waits no more."""

Together = Callable[[Callable[[], Any]], list[Any]]
"""Calls its argument on each of the processes that ask as one; returns what it has returned, in the order of processes.
If it has raised a CommError on some, all raise that of one of them."""


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

    def __init__(self, party: Party) -> None:
        self._party = party
        self._store = party.store("newcomers")
        self.invites = False
        """Whether this member is the one that looks."""
        self._waiting: dict[int, Place] = {}
        self._lock = threading.Lock()
        self._admitted: set[int] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-newcomers", daemon=True)

    def open(self, settings: Mapping[str, Any], size: int) -> None:
        """From now on, processes with these settings may ask. `size`: ranks at the start of the job. All call."""
        party = self._party
        party.pulse.beat()  # also on one host: those that will ask may run on another
        self._store.set(SETTINGS, json.dumps(settings))
        self._store.set(ROSTER, json.dumps(party.roster()))
        self._store.set(FIRST, str(size))
        self._store.compare_set(COUNT, "", str(size))  # the first of them gets this number
        engine = Engine.current()
        if party.KEEPS_WORLD and engine is not None and engine.job is not None:
            self._store.set(KEY, entry(engine.job))
            _put_back(party.root, self._store)
        party.root.set(party.JOB, party.token)
        self._thread.start()

    def invite(self) -> bool:
        """Whether processes wait, which the next agreement of the party takes in. One member calls."""
        party = self._party
        try:
            waiting = self.waiting()
            party.add(waiting, are_new=True)
            found = set(waiting) - party.dead(waiting)
            living = {each for each in found if party.whole({each}) <= found}
            if living:
                party.survivors().invite(living)
        except RuntimeError as error:
            log.warning("rank %d cannot invite those that wait to join: %s", party.own, error)
            return False
        return bool(living)

    def waiting(self) -> dict[int, Place]:
        """Those that wait now, and where they run. Raises RuntimeError without a Store."""
        with self._lock:
            found = {number: place for number, place in self._waiting.items() if number not in self._admitted}
        return {number: place for number, place in found.items() if not self._store.check([f"answer {number}"])}

    def follow(self) -> None:
        """For a member that has joined: watches, too."""
        self._thread.start()

    def admit(self, verdict: Verdict) -> list[int]:
        """After an agreement: the party has the members of the verdict. Tells them to the new ones, which it returns,
        and to those that will ask."""
        party = self._party
        newest = [each for each in verdict.joining if each not in verdict.gone]
        party.add({number: _place(self._store.get(f"{number}")) for number in newest}, are_new=True)
        party.members = [*(each for each in party.members if each not in verdict.gone), *newest]
        roster = json.dumps(party.roster())
        self._store.set(ROSTER, roster)
        for number in newest:
            self._store.set(f"answer {number}", roster)
        with self._lock:
            self._admitted |= set(newest)
        return newest

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
            store, seen = connection(self._store, self._party.silence_s), set()
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


PartyT = TypeVar("PartyT", bound=Party)


def alone(do: Callable[[], Any]) -> list[Any]:
    """`Together`, of a process that asks by itself."""
    return [do()]


def ask(
    kind: type[PartyT],
    given: dist.Store,
    describe: Callable[[str], Mapping[str, Any]],
    place: Place,
    timeout_s: float,
    wait_s: float,
    together: Together = alone,
) -> PartyT:
    """Waits until a job takes this process in; returns its party, of this kind, which is about to make a group.
    `together`: that of the processes that ask as one, all of which call.

    `describe` returns the settings by the job's token. Raises ConfigError, which names them, if some differ from the
    job's; ClosedError if the job has ended, PeerLostError if it has died, OperationTimeoutError after `wait_s` without
    a job, or without an answer.
    """
    root, end_s = root_of(given), time.monotonic() + wait_s
    limit(root, timeout_s)

    def act(do: Callable[[], Any]) -> list[Any]:
        return together(lambda: _in_store(do))

    def compare() -> None:
        if text := difference(describe(token), json.loads(store.get(SETTINGS)), "here", "in the job"):
            raise ConfigError(f"this process cannot join: {text}; start it as the job's ranks were started")

    def take_numbers() -> int:
        return int(store.add(COUNT, len(places))) - len(places) if leads else -1

    places = act(lambda: place)
    leads = places[0] == place
    late = f"no job on this Store took ranks within {wait_s:g} s ({kind.OPENS})"
    _await(lambda: root.check([kind.JOB]), leads, end_s, late, act)
    token = act(lambda: root.get(kind.JOB).decode())[0]
    party = kind(root, token, -1, place, timeout_s)
    store = party.store("newcomers")
    act(lambda: _put_back(root, store))
    act(compare)
    party.name(act(take_numbers)[0] + places.index(place))
    party.pulse.beat()
    try:
        act(lambda: store.set(f"{party.own}", json.dumps(place)))
        _wait(party, store, leads, end_s, wait_s, act)
    except BaseException:
        _withdraw(party, store)
        raise
    return party


def _put_back(root: Any, store: Any) -> None:
    """Tools find the job in its Store, and not the WORLD of processes that join it."""
    if store.check([KEY]) and store.get(KEY) != root.get(JOB):
        root.set(JOB, store.get(KEY))


def _in_store(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except CommError:
        raise
    except RuntimeError as error:
        raise CommError(f"the job's Store does not answer: look at the process that serves it. ({error})") from error


def _wait(party: Party, store: Any, leads: bool, end_s: float, wait_s: float, act: Together) -> None:
    """Until the answer is there."""
    look_s = 0.0

    def is_answered() -> bool:
        nonlocal look_s
        if store.check([f"answer {party.own}"]):
            return True
        if store.check([ENDED]):
            raise ClosedError("the job has ended, or is about to end, and takes no ranks any more")
        if time.monotonic() > look_s:
            look_s = time.monotonic() + ALIVE_S
            party.follow(json.loads(store.get(ROSTER)))
            if party.dead(party.members) == set(party.members):
                raise PeerLostError(f"all ranks of the job ({party.members}) have died; start it again")
        return False

    late = f"the job did not take this process in within {wait_s:g} s; look at its log"
    _await(is_answered, leads, end_s, late, act)
    act(lambda: party.follow(json.loads(store.get(f"answer {party.own}"))))  # the others' comes right after the first


def _await(look: Callable[[], bool], leads: bool, end_s: float, late: str, act: Together) -> None:
    """Returns once `look` has returned True on the process that leads. Those that ask with it look for the time alone,
    and wait for its word, which it gives every `ALIVE_S` at least. Raises OperationTimeoutError, with the text `late`,
    after `end_s` of one of them."""

    def has_seen() -> bool:
        word_s = min(time.monotonic() + ALIVE_S, end_s)
        while leads and time.monotonic() < word_s:
            if look():
                return True
            time.sleep(PAUSE_S)
        if time.monotonic() > end_s:
            raise OperationTimeoutError(late)
        return False

    while not any(act(has_seen)):
        pass


def _withdraw(party: Party, store: Any) -> None:
    """The members need not wait for this process, not even if they have just taken it in."""
    party.pulse.close()
    with contextlib.suppress(RuntimeError):  # without a Store
        answer = store.compare_set(f"answer {party.own}", "", WITHDRAWN).decode()
        if answer != WITHDRAWN:
            party.generation = json.loads(answer)["generation"]
            party.survivors().withdraw()


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
