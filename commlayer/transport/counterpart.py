"""Warns of sends and receives that wait: has the other rank called the matching one, and where is it instead?

A rank whose message has waited for COMMLAYER_STALL_S asks the process of the other rank, through the Store. A thread of
that process looks for questions, and answers them even while the main thread is stuck.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .base import Store
from .call import Call, Calls
from .log import log
from .places import place_of, where

ASKED_MAX = 8
"""Messages of a group whose other ranks are asked at the same time: one for each other rank and direction."""
ANSWERED_MAX = 64
"""Questions that a process answers at one look."""
COUNTERPART = {"send": "receive", "receive": "send"}


@dataclasses.dataclass(eq=False)
class Wait:
    """A message that waits for another rank, which was asked about it."""

    call: Call
    answer_key: str
    asked_s: float
    is_told: bool = False
    """Whether this rank has warned of it."""


@dataclasses.dataclass(eq=False)
class Counterparts:
    """The sends and receives of one group on this rank. `descriptions`: of all ranks' engines."""

    who: Callable[[], str]
    """Returns this rank and the group, for texts."""
    name: str
    """The name of the group."""
    rank: int
    descriptions: Sequence[Mapping[str, Any]]
    calls: Calls
    store: Store
    """The Store shared by all groups of the job."""
    _waits: dict[tuple[str, int], Wait] = dataclasses.field(default_factory=dict)
    """One wait per direction and other rank."""
    _told_any: bool = False
    """Whether this rank has warned of a receive from any rank: a process that serves others waits in one for long."""

    def follow(self, stall_s: float, patience_s: float) -> bool:
        """Asks and warns of messages that have waited for `stall_s`. Returns whether an answer is awaited, for
        `patience_s` at most."""
        for end, wait in list(self._waits.items()):
            if not wait.call.is_running():
                del self._waits[end]
                self._went_on(wait)
        for call in self._waiting(stall_s):
            if call.rank is None:
                self._warn_of_any(call)
            elif (call.name, call.rank) not in self._waits and len(self._waits) < ASKED_MAX:
                self._waits[call.name, call.rank] = self._ask(call, call.rank)
        awaited = [wait for wait in self._waits.values() if not wait.is_told]
        for wait in awaited:
            self._hear(wait, patience_s)
        return not all(wait.is_told for wait in awaited)

    def answer(self, kind: str, other: int, tag: int, ordinal: int) -> str:
        """The answer to the rank `other` of the group: it waits in its `ordinal`th `kind` (send or receive) with this
        rank and tag."""
        own, wanted = name_of(self.descriptions[self.rank]), COUNTERPART[kind]
        calls = [call for call in list(self.calls.messages) if call.name == wanted and call.rank in (other, None)]
        alike = [call for call in calls if call.tag == tag]
        for call in alike:
            if call.is_running() and (call.rank is None or call.ordinal == ordinal):
                waited = f"{own} has waited {call.elapsed_s():.0f} s in {self._called(call)}"
                return f"{waited}: the data is on its way; see the paths in print(commlayer.paths())"
        if any(call.rank is not None and call.ordinal >= ordinal for call in alike):
            return f"the matching {wanted} of {own} has ended: has a receive from any rank taken the message?"
        parts = [f"{own} has not called the matching {wanted}"]
        known = [*list(self.calls.collectives), *list(self.calls.messages)]
        running = [call for call in known if call.is_running()]
        oldest = min(running, key=lambda call: call.submitted_s, default=None)
        if oldest is not None:
            parts.append(f"it waits in {self._called(oldest)}")
        elif calls and calls[-1].tag != tag:
            parts.append(f"its latest {wanted} of the two ranks is {self._called(calls[-1])}")
        return "; ".join([*parts, f"its main thread is in {where()}"])

    def _waiting(self, stall_s: float) -> Iterator[Call]:
        """The messages in flight that were called over `stall_s` ago, the oldest first."""
        since_s = time.monotonic() - stall_s
        return (call for call in list(self.calls.messages) if 0 < call.submitted_s <= since_s and call.is_running())

    def _ask(self, call: Call, other: int) -> Wait:
        life = self.descriptions[other]["life"]
        number = self.store.add(_count_key(life), 1)
        question = Question(self.name, call.name, self.rank, call.tag or 0, call.ordinal)
        self.store.set(_question_key(life, number), question.write())
        return Wait(call, _answer_key(life, number), time.monotonic())

    def _hear(self, wait: Wait, patience_s: float) -> None:
        """Warns with the answer of the other rank, or when there is none."""
        if self.store.check([wait.answer_key]):
            self._warn(wait, self.store.get(wait.answer_key).decode(errors="replace"))
            self.store.delete_key(wait.answer_key)
        elif time.monotonic() - wait.asked_s > patience_s and wait.call.rank is not None:
            other = name_of(self.descriptions[wait.call.rank])
            self._warn(wait, f"{other} does not answer: its process is stopped or has ended, or has left the group")

    def _warn(self, wait: Wait, reason: str) -> None:
        wait.is_told = True
        log.warning("%s: %s has waited %.0f s: %s", *self._waited(wait.call), reason)

    def _warn_of_any(self, call: Call) -> None:
        if not self._told_any:
            self._told_any = True
            log.warning("%s: %s has waited %.0f s: no rank has sent a message with this tag", *self._waited(call))

    def _went_on(self, wait: Wait) -> None:
        if not wait.is_told:
            self.store.delete_key(wait.answer_key)
        elif not wait.call.has_failed():
            log.warning("%s: %s went on after %.0f s", self.who(), wait.call.title(), wait.call.elapsed_s())

    def _waited(self, call: Call) -> tuple[str, str, float]:
        called = self._called(call)
        return self.who(), f"{called}," if place_of(call) else called, call.elapsed_s()

    def _called(self, call: Call) -> str:
        """`send 3 of float32 [4] to rank 1, tag 7, called in step (train.py:50)`."""
        numbers = [int(description["peer"]) for description in self.descriptions]
        place = place_of(call)
        return f"{call.title()} {call.arguments(numbers)}".rstrip() + f", called in {place}" * bool(place)


@dataclasses.dataclass(frozen=True)
class Question:
    """The question of a rank whose message waits: the arguments of `Counterparts.answer`, and the group's name."""

    group: str
    kind: str
    other: int
    tag: int
    ordinal: int

    @classmethod
    def read(cls, data: bytes) -> Question:
        """Raises ValueError if `data` is no question: any program that reaches the Store can write there."""
        found = fields_of(data, group=str, kind=str, other=int, tag=int, ordinal=int)
        if found["kind"] not in COUNTERPART:
            raise ValueError(f"kind is {found['kind']!r}")
        return cls(**found)

    def write(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class Questions:
    """The questions of other ranks to this process, in the life of one engine."""

    def __init__(self, store: Store, life: str, name: str) -> None:
        """`name`: of this rank, as `name_of` gives it."""
        self._store = store
        self._name = name
        self._life = life
        self._read = 0
        self._absent = 0
        self._told_malformed = False

    def answer(self, groups: Mapping[str, Counterparts]) -> None:
        """Answers the new questions. `groups`: those of this process, by name."""
        asked = self._store.add(_count_key(self._life), 0)
        for number in range(self._read + 1, min(asked, self._read + ANSWERED_MAX) + 1):
            key = _question_key(self._life, number)
            if self._store.check([key]):
                data = self._store.get(key)
                self._store.delete_key(key)
                text = self._text(groups, data)
                if text is not None:
                    self._store.set(_answer_key(self._life, number), text)
            elif self._absent != number:  # the rank that asks has counted its question, and is about to write it
                self._absent = number
                return
            self._read = number

    def _text(self, groups: Mapping[str, Counterparts], data: bytes) -> str | None:
        """The answer. None: it is no question, which is logged once."""
        try:
            question = Question.read(data)
        except ValueError as error:
            if not self._told_malformed:
                self._told_malformed = True
                remedy = "do all ranks run the same version of commlayer?"
                log.warning("%s skips a malformed question in the Store (%s): %s", self._name, error, remedy)
            return None
        if question.group in groups:
            return groups[question.group].answer(question.kind, question.other, question.tag, question.ordinal)
        return f"{self._name} has left group {question.group!r}; its main thread is in {where()}"


def fields_of(data: bytes, **types: type) -> dict[str, Any]:
    """The JSON object `data`, whose fields have these types. Raises ValueError if it is anything else."""
    found = json.loads(data)
    if not isinstance(found, dict) or found.keys() != types.keys():
        raise ValueError(f"it is no object with the fields {', '.join(types)}")
    for name, value in found.items():
        if type(value) is not types[name]:
            raise ValueError(f"{name} is {value!r}")
    return found


def name_of(description: Mapping[str, Any]) -> str:
    """`rank 3 on hostb`: the rank in the job of a process, with its host."""
    host = description.get("hostname")
    return f"rank {description['peer']}" + (f" on {host}" if host else "")


def _count_key(life: str) -> str:
    return f"commlayer/questions/{life}"


def _question_key(life: str, number: int) -> str:
    return f"commlayer/question/{life}/{number}"


def _answer_key(life: str, number: int) -> str:
    return f"commlayer/answer/{life}/{number}"
