"""`Mates`: members of a party that go as a whole: without one of them, the others of them cannot go on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Sequence

from .party import Party

CAUSE = 400
"""Characters of an error that a member tells its mates."""

PAUSE_S = 0.01

DYING_S = 1.0
"""A process that ends may take so long on a busy machine. Its mates hear of its end before, by their sockets or their
engines, and give up."""


class Mates:
    """Those of one member. `ranks`: the numbers of all of them, its own included. `noun`: the word for them."""

    def __init__(self, party: Party, ranks: Sequence[int], noun: str) -> None:
        self.ranks = list(ranks)
        self._party, self._noun = party, noun
        self._store = party.store(f"{noun} of {ranks[0]}")

    def give_up(self, cause: BaseException) -> None:
        """This member cannot go on, because of this error. The first of the mates to say so is the one to look at.
        Does nothing without a Store."""
        if len(self.ranks) == 1:
            return
        told = json.dumps([self._party.own, f"{type(cause).__name__}: {cause}"[:CAUSE]])
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("gave up", "", told)
            self._store.set(f"{self._party.own} gave up", "")

    def leave(self) -> None:
        """This member has left as it was to: its process may end. Does nothing without a Store."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._party.own} has left", "")

    def loss(self, culprit: int | None, others: Collection[int] | None, patience_s: float) -> str:
        """The text of an error, if a mate is gone; else it is empty. Looks for it so long, or until it is clear
        that all mates live. `culprit`: the member that an error of this one names. `others`: the members that may go
        on; None: none does, of those that live."""
        begun_s = time.monotonic()
        while not (found := self._died(culprit)) and (passed_s := time.monotonic() - begun_s) < patience_s:
            if (passed_s > DYING_S and (found := self._gave_up())) or self._is_alone(passed_s):
                break
            time.sleep(PAUSE_S)
        found = found or self._gave_up()
        if not found:
            return ""
        if others is None:
            return (
                f"rank {self._party.own}: {found}, and a {self._noun} cannot train without one of its ranks; start the "
                f"job again from a checkpoint"
            )
        rest = sorted(set(others) - set(self.ranks))
        then = (
            f"rank(s) {_listed(rest)} go on without it, if they are enough"
            if rest
            else f"no other {self._noun} is whole"
        )
        remedy = "end this process" if rest else "unless these have ended well, start the job again from a checkpoint"
        return (
            f"rank {self._party.own}: {found}, and a {self._noun} cannot train without one of its ranks; {then}; "
            f"{remedy}"
        )

    def dead(self) -> set[int]:
        """The mates that have ended, or are silent. None without a Store."""
        with contextlib.suppress(RuntimeError):
            return self._party.pulse.dead(set(self.ranks) - {self._party.own})
        return set()

    @property
    def _whose(self) -> str:
        return f"of its {self._noun}, {_listed(self.ranks)},"

    def _died(self, culprit: int | None) -> str:
        """Which mates have died, as this member has found."""
        if dead := {each for each in self.dead() if not self._has_told(each)}:
            return f"rank(s) {_listed(dead)} {self._whose} died or ended"
        if culprit in set(self.ranks) - {self._party.own} and not self._has_told(culprit):
            return f"rank {culprit} {self._whose} died, ended or did not answer"
        return ""

    def _gave_up(self) -> str:
        """Which mate was the first to give up, and why."""
        with contextlib.suppress(RuntimeError):
            if self._store.check(["gave up"]):
                first, cause = json.loads(self._store.get("gave up"))
                return "" if first == self._party.own else f"rank {first} {self._whose} gave up ({cause})"
        return ""

    def _is_alone(self, passed_s: float) -> bool:
        """Whether this member was the first to give up, and its mates live: they have followed it, or are on this host,
        which would have told their end by now."""
        host = self._party.places[self._party.own][0]
        here = {mate for mate in self.ranks if passed_s > DYING_S and self._party.places[mate][0] == host}
        return not self._gave_up() and all(mate in here or self._has_told(mate) for mate in self.ranks)

    def _has_told(self, mate: int) -> bool:
        """Whether it has given up by itself, or has left."""
        with contextlib.suppress(RuntimeError):
            return any(self._store.check([f"{mate} {word}"]) for word in ("gave up", "has left"))
        return False


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
