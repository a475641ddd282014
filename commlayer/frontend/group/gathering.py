"""`Gathering`: the members of a new WORLD, which each of them names by handles, agree on it and watch each other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ...errors import CommError, ConfigError, MismatchError, PeerLostError
from ...transport.accord import Accord, Verdict, store_errors
from ...transport.bootstrap import presence
from ...transport.members import TOLD_MAX
from ...transport.native import host_key
from ...transport.pulse import Pulse

CALL = "reconfigure"
_PREFIX = "commlayer:"
_DONE = "done"
_WITHOUT = "leave out the handles of the dead, and pass another uuid"
_SAME = "pass the same uuid, and present handles, on all members"


@dataclasses.dataclass(frozen=True, order=True)
class MemberHandle:
    """A process, as a member of a WORLD or before it is one; as text, a handle of torch's contract."""

    rank: int
    """Its rank in the WORLD that it is a member of now."""
    uuid: int | None
    """The number of that WORLD; None: it has been in none."""
    life: str
    """Identifies the process group of the process."""
    process: int
    host: str
    hostname: str
    store: str
    """Identifies the Store in which the members meet."""

    @classmethod
    def own(cls, rank: int, store: str) -> MemberHandle:
        """That of this process, which is in no WORLD yet."""
        return cls(rank, None, secrets.token_hex(8), os.getpid(), host_key(), socket.gethostname(), store)

    @classmethod
    def read(cls, text: str) -> MemberHandle:
        """Raises ValueError unless this is the text of one."""
        if not text.startswith(_PREFIX):
            raise ValueError(text)
        values = json.loads(text.removeprefix(_PREFIX))
        types: list[Any] = [int, (int, type(None)), str, int, str, str, str]
        if not isinstance(values, list) or len(values) != len(types):
            raise ValueError(text)
        if not all(isinstance(value, kind) for value, kind in zip(values, types, strict=True)):
            raise ValueError(text)
        return cls(*values)

    def __str__(self) -> str:
        return f"{_PREFIX}{json.dumps(dataclasses.astuple(self))}"

    @property
    def who(self) -> str:
        """The process, for errors."""
        return f"process {self.process} on {self.hostname}"


def members_of(handles: Iterable[str], own: MemberHandle) -> list[MemberHandle]:
    """The members by rank of the new WORLD: a list gives the order; of a set, processes keep the order of their present
    ranks. Raises ConfigError, which names the wrong handle."""
    listed = list(handles)
    wrong = f"{CALL}: handles="
    remedy = "pass what dist._get_reconfigure_handle() returns on each member now"
    if not listed:
        raise ConfigError(f"{wrong}{handles!r}: pass the handle of each member, this process's among them")
    members = []
    for text in listed:
        try:
            members.append(MemberHandle.read(text))
        except ValueError as error:
            raise ConfigError(f"{wrong}[... {text!r} ...]: that is no handle of commlayer; {remedy}") from error
    if not isinstance(handles, list):
        members.sort(key=lambda member: (member.rank, str(member)))
    for member in members:
        if members.count(member) > 1 or [other.life for other in members].count(member.life) > 1:
            raise ConfigError(f"{wrong}{listed!r}: {member.who} is there twice; pass one handle of each member")
        if member.store != own.store:
            raise ConfigError(
                f"{wrong}[... {str(member)!r} ...]: {member.who} has another Store than {own.who}; make all "
                f"WORLDs with one Store"
            )
    if own not in members:
        former = next((member for member in members if member.life == own.life), None)
        told = f"a former handle of this process is there ({former})" if former else "the one of this process is absent"
        raise ConfigError(f"{wrong}{listed[:TOLD_MAX]!r}: {told}; {remedy}")
    return members


class Gathering:
    """One attempt of `members`, by rank of the new WORLD, of which `rank` is this process's. `root`: the part of the
    Store that all attempts share. `silence_s`: after so long a silence, a process of another host is dead."""

    def __init__(self, root: dist.Store, members: Sequence[MemberHandle], rank: int, uuid: int, silence_s: float):
        self._root = root
        self._members = members
        self._rank = rank
        self._uuid = uuid
        self._call = _call(members[rank])
        self._absent = set(range(len(members))) - {rank}
        self._places = {place: (member.host, member.process) for place, member in enumerate(members)}
        own_host = members[rank].host
        here = {place: at for place, at in self._places.items() if at[0] == own_host}
        self._pulse = Pulse(dist.PrefixStore(f"{uuid}/pulse", root), rank, here, silence_s)
        if len(here) < len(members):
            self._pulse.beat()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """The context of the whole attempt: `agree`, and all that makes the new WORLD. Its end is told to the others,
        and the members are watched no more."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the Store is gone
                self._root.set(self._call, "")
            raise
        else:
            with store_errors(lambda text: self._error(CommError, text, None)):
                self._root.set(self._call, f"{self._uuid} {_DONE}")
        finally:
            self._pulse.close()

    @property
    def store(self) -> dist.Store:
        """A part of the Store that no other attempt has, for the members to meet in."""
        return dist.PrefixStore(f"{self._uuid}", self._root)

    def agree(self, timeout_s: float) -> None:
        """Returns once all members have called it with the same `members` and uuid.

        An error is the same on all that have called with this uuid: MismatchError for other members on one of them, and
        for a member that calls with another uuid; PeerLostError for one that is dead; OperationTimeoutError for one
        that does not come within `timeout_s`; CommError without a Store.
        """
        proposal = json.dumps([str(member) for member in self._members])
        with store_errors(lambda text: self._error(CommError, text, None)):
            accord = self._accord(self._uuid)
            former = accord.verdict()
            if former is not None and former.agreed and former.agreed != proposal:
                raise self._used(f"by {self._count(former.agreed)}")
            self._root.set(self._call, str(self._uuid))

            def late(absent: Sequence[int]) -> str:
                remedy = "look at their logs and stacks, or leave their handles out"
                return f"{self._names(absent)} did not call it within {timeout_s:g} s; {remedy}"

            verdict = accord.settle(proposal, self._differ, lambda: self._obstacle(accord), late, timeout_s)
            if verdict.kind is not None:
                raise self._error(verdict.kind, verdict.text, verdict.culprit)
            if verdict.agreed != proposal:
                raise self._used(f"by {self._count(verdict.agreed)}")

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """A context in which a meeting of the members ends with PeerLostError once one of them has died."""
        return presence(self._check)

    def _accord(self, uuid: int) -> Accord:
        return Accord(self._root, f"{uuid}/", self._rank, range(len(self._members)))

    def _check(self) -> None:
        dead = sorted(self._pulse.dead(set(self._places) - {self._rank}))
        if dead:
            raise self._error(PeerLostError, f"{self._names(dead)} died while the members met; {_WITHOUT}", dead[0])

    def _obstacle(self, accord: Accord) -> Verdict | None:
        for place in sorted(self._absent):
            if accord.has_come(place):
                self._absent.remove(place)
                self._pulse.add(place, self._places[place])  # those of other hosts beat from now on
        dead = sorted(self._pulse.dead(set(self._places) - {self._rank}))
        if dead:
            return Verdict.against(PeerLostError, f"{self._names(dead)} died; {_WITHOUT}", dead[0])
        for place in sorted(self._absent):
            told = self._elsewhere(place)
            if told:
                return Verdict.against(MismatchError, f"{self._names([place])} {told}; {_SAME}", place)
        return None

    def _elsewhere(self, place: int) -> str:
        """Where another member is, if it cannot come with the handle that is known here. Empty: it can."""
        key = _call(self._members[place])
        called, _, done = (self._root.get(key).decode() if self._root.check([key]) else "").partition(" ")
        if called in ("", str(self._uuid)):
            return ""
        if done:
            return f"has gone on with uuid {called}, so its handle is a former one"
        other, own = self._accord(int(called)), self._members[self._rank]
        if other.verdict() is not None or not other.proposal():
            return ""  # that attempt fails, or it goes on with it: it will tell; or it has just begun
        told = f"calls it with uuid {called}, and {self._names([self._rank])} with {self._uuid}"
        if str(own) in json.loads(other.proposal()):  # there, they wait for this process
            who = self._members[place].who
            text = f"{own.who} calls it with uuid {self._uuid}, and {who} with {called}; {_SAME}"
            other.end(Verdict.against(MismatchError, text, None))
        return told

    def _differ(self, _: int, proposed: str) -> str:
        """That another process with this uuid has named other members, or in another order."""
        theirs = [MemberHandle.read(text) for text in json.loads(proposed)]
        more, fewer = set(theirs) - set(self._members), set(self._members) - set(theirs)
        if more or fewer:
            parts = [(more, "without"), (fewer, "with")]
            differs = " and ".join(f"{word} {_told(sorted(which))}" for which, word in parts if which)
        else:
            differs = "in another order"
        own = self._members[self._rank].who
        return (
            f"{own} names {len(self._members)} members with uuid {self._uuid}, {differs}, and another process names "
            f"{len(theirs)}; pass the same handles on all members, and a uuid of its own to each WORLD"
        )

    def _used(self, told: str) -> CommError:
        return self._error(MismatchError, f"uuid {self._uuid} was already used {told}; pass another one", None)

    @staticmethod
    def _count(agreed: str) -> str:
        return f"a WORLD of {len(json.loads(agreed))} other members"

    def _names(self, places: Sequence[int]) -> str:
        """`rank(s) 1 (process 4711 on hosta)`: ranks of the new WORLD."""
        told = ", ".join(f"{place} ({self._members[place].who})" for place in places[:TOLD_MAX])
        rest = len(places) - TOLD_MAX
        return f"rank(s) {told}{f' and {rest} others' if rest > 0 else ''}"

    def _error(self, kind: type[CommError], text: str, culprit: int | None) -> CommError:
        error = kind(f"rank {self._rank} of a WORLD of {len(self._members)}: {CALL}: {text}")
        error.rank, error.operation, error.culprit = self._rank, CALL, culprit
        error.host = None if culprit is None else self._members[culprit].hostname
        return error


def _call(member: MemberHandle) -> str:
    """The key under which a member tells the uuid with which it calls at present, or has gone on."""
    return f"call {member}"


def _told(members: Sequence[MemberHandle]) -> str:
    rest = len(members) - TOLD_MAX
    told = ", ".join(member.who for member in members[:TOLD_MAX])
    return f"{told}{f' and {rest} others' if rest > 0 else ''}"
