"""`Rounds`: the local steps of a rank and their syncs, one in flight at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from ...compress.codec import FINE, codec_of
from ...compress.fine import Fine
from ...errors import ClosedError
from ..group.backend import CommProcessGroup
from ..group.kept import Kept
from ..group.told import told_by_all
from . import tally
from .arriving import Arriving
from .bell import Bell
from .living import Living
from .meeting import LOST
from .outer import Outer
from .pace import Pace
from .report import Report, outcome_of
from .shared import Shared
from .site import Site
from .stand_in import StandIn
from .sync import Ended, Head, Outcome, Sync, finite
from .tally import Tally
from .turns import Turns
from .vote import Vote
from .weights import Told, Weights

FIELDS = ("sizes", "shared", "momentum", "steps", "syncs", *tally.FIELDS, "buffers", "sync")
"""The names in a saved state."""

PAUSE_S = 0.001
"""The pause of a rank that sends or receives a state, between two looks for the end of a sync."""


class Form(NamedTuple):
    """How fragments travel."""

    codec: str
    fine: Fine
    is_weighted: bool
    """Whether sites count by their samples."""
    is_uneven: bool = False
    """Whether a site begins a turn as soon as another one does."""
    quorum: int | None = None
    """The sites that must count in a sync, at least; None: all that live."""
    is_paced: bool = False
    """Whether H follows the times of syncs."""


class Rounds:
    """All ranks make the same syncs in the same order."""

    def __init__(self, living: Living, weights: Weights, site: Site, turns: Turns, outer: Outer, form: Form) -> None:
        self.pace = Pace(turns, follows=form.is_paced)
        self._living, self._weights, self._site, self._form = living, weights, site, form
        self.shared = Shared(weights, site, turns.fragments, outer, form.fine)
        self.steps = 0
        """Local steps of this rank, including those before a checkpoint."""
        self.syncs = 0
        """Syncs that this rank has begun."""
        self._since = 0  # local steps since the latest turn began
        self._tally = Tally(turns.fragments)
        self._told = Told()
        self._sync: Sync | None = None
        self._kept = Kept[Ended](lambda ended: ended.nbytes)  # what the model lacks
        self._before = 0.0  # `trained` before the last step
        self._marks: set[float] = set()  # see `passed`
        self.is_behind = False
        """Whether the loop was late once: since then it begins turns as an uneven site does."""
        self.course: Callable[[], Mapping[str, Any]] = dict
        """Tells a site that joins what it needs beside the shared weights, in Python's own types and tensors."""
        self._last: Outcome | None = None  # of the last sync, for sites that lack it after a death
        self._bell: Bell | None = None
        self.stand_in: StandIn | None = None
        self._arriving = Arriving(self.shared, lambda: {"steps": self.steps, "course": self.course()})
        self._is_listening = False
        """Whether this site has joined, and made no step since."""
        self._is_away = False
        """Whether a thread acts on behalf of the loop."""

    @property
    def turns(self) -> Turns:
        """Those of the next sync."""
        return self.pace.turns

    def listen(self, silence_s: float) -> None:
        """Before the first step: from now on, turns that other sites begin are heard."""
        if self._form.quorum is not None:
            self.stand_in = StandIn(self, self._form.quorum, self._vote)
        if self._form.is_uneven or self.stand_in is not None:
            then = None if self.stand_in is None else self.stand_in.look
            self._bell = Bell(self._living.store, self.syncs, silence_s, then)

    @property
    def _vote(self) -> Vote | None:
        """That of this site; None: it has one rank."""
        size = len(self._site.ranks)
        return Vote(self._living.own_site[0], self._site.place, size) if size > 1 else None

    def close(self) -> None:
        """Ends the thread that listens. Idempotent."""
        if self.stand_in is not None:
            self._living.stop()
        if self._bell is not None:
            self._bell.close()

    def halt(self) -> None:
        """The same after an error of the loop: also a thread that waits for other sites ends."""
        if self.stand_in is not None:
            self._living.stop()
            self._living.abort()
            self._site.stop()
        self.close()

    def _loop(self, **kind: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which the loop, and no thread on its behalf, begins and ends syncs."""
        return contextlib.nullcontext() if self.stand_in is None else self.stand_in.loop(**kind)

    def step(self, samples: float) -> None:
        """A local step was made, with so many samples of this site. Applies a sync that is due, then begins one."""
        with self._loop(is_step=True):
            self._step(samples)

    def _step(self, samples: float) -> None:
        self.steps += 1
        self._since += 1
        self._before = self.shared.trained
        self._pump()
        self._tally.add(samples)
        if self.pace.follows and self._sync is not None and self._sync.is_done:
            self.pace.see(self._sync.head.turn, self._sync.age + 1)
        if self._is_to_apply():
            self._finish()
            if self._kept:
                return  # a checkpoint comes first
        if self._is_due():
            self._finish()
            if self._kept or (not self.turns.delay and self._has_passed(self._before)):
                return  # the same; the thread takes part in this turn, or the next step does
            self._start()
            if not self.turns.delay:
                self._finish()

    def _is_to_apply(self) -> bool:
        """One step later: whether the oldest sync that the model lacks is `delay` steps old, or not the only one."""
        oldest = self._kept.first if self._kept else self._sync
        if oldest is None:
            return False
        oldest.age += 1
        return oldest.age >= self.turns.delay or len(self._kept) + self.is_flying > 1

    def _is_due(self) -> bool:
        """Whether the next turn begins now: after as many steps of this site; of uneven sites, of the fastest."""
        if self._bell is None or not (self._form.is_uneven or self.is_behind):
            return self.turns.begins(self.steps)
        if self._since >= self.turns.length(self.syncs):
            return True
        return bool(self._site.largest([self._bell.rung(self.syncs)])[0])  # its ranks hear the bell at several times

    def passed(self, samples: float) -> bool:
        """Whether `trained` has passed a multiple of this in the last step. From the first call on, a step applies no
        sync after one that passes a multiple: all sites save the state after the same sync, also one that has to apply
        several."""
        self._marks.add(samples)
        return self._before // samples < self.shared.trained // samples

    def _has_passed(self, before: float) -> bool:
        """Whether `trained` has passed a mark since it was `before`."""
        return any(before // mark < self.shared.trained // mark for mark in self._marks)

    def leave(self) -> None:
        """Makes the last syncs, and gives the model the shared weights.

        Ranks that skipped steps have begun fewer syncs than others: they take part until all leave. Then each fragment
        is sent once more. A site that dies after that is not missed, but those that live make sure that all have the
        last sync. Raises MismatchError on all ranks of a site of which one makes further steps.
        """
        self._marks.clear()
        with self._loop():
            self._site.part()
            self._finish()
            self._told = self._weights.at_end()
            self._ring()  # an uneven site applies the sync before, which has ended this loop, when it begins the next
            together = 0
            while together < self.turns.fragments:
                self._start(is_leaving=True)
                heads = self._finish()
                together = together + 1 if all(head.is_leaving for head in heads) else 0
            if self._living.goes_on:
                self._site.agreed(self._close)
            self.shared.put()

    def _close(self) -> None:
        """Returns once all sites that live have made the last sync. It may fail on one rank of a site alone, which has
        not heard of the end."""
        while not self._living.is_finished:
            try:
                self._living.everyone.barrier().wait()
            except LOST as error:
                self._living.regroup(error, functools.partial(self._meet, None))
            else:
                self._living.finish()
                return

    def _start(self, *, is_leaving: bool = False) -> None:
        """Begins the next sync. A loop that has ended waits for the turns of the others."""
        if not is_leaving:
            self._ring()
        self._weights.check_unchanged()
        at = self.turns.fragment(self.syncs)
        fragment = self.shared.fragments[at]
        difference = fragment.weights()
        if not self._arriving.joins:  # else the model has the difference, until it gets G
            difference -= fragment.shared
        steps, samples = self._tally.take(at)
        self._is_listening = self._is_listening and not steps
        digest = 0 if self._arriving.joins else fragment.digest()
        invites = not is_leaving and self._living.invite()
        head = Head(self.syncs, digest, finite(difference), is_leaving, steps, samples)
        is_last = at == self.turns.fragments - 1
        own = self._weights.flat_buffers() if is_last else torch.zeros(0, dtype=torch.float32, device="cpu")
        if self._is_listening:
            own.zero_()
        told = self._told._replace(spoiled=self._weights.spoiled(own))
        head = head._replace(is_listening=self._is_listening, invites=invites, **told._asdict())
        self._begin(self.pace.tell(head, self._site), difference, self._site.average(own))
        self.syncs, self._since = self.syncs + 1, 0

    def _ring(self) -> None:
        """The loop begins the next turn, and the others hear that."""
        if self._bell is not None:
            if self.stand_in is not None:
                self.stand_in.grace.began(self._bell.late_s(self.syncs))
            self._bell.ring(self.syncs)

    def _begin(self, head: Head, difference: torch.Tensor, buffers: torch.Tensor, age: int = 0) -> None:
        pair = codec_of(self._form.codec).pair
        fine = None if pair is None else codec_of(FINE).pair
        parts = self.shared.fragments[self.turns.fragment(head.turn)].parts
        (ranks, has_listeners), weighted, group = self._others, self._form.is_weighted, self._living.group
        every = self._every
        sync = Sync(group, head, difference, parts, pair, fine, buffers, weighted, ranks, age, has_listeners, every)
        sync.start()
        self._sync = sync

    @property
    def _others(self) -> tuple[list[int], bool]:
        """The ranks of a sync that begins now, and whether some of them count nothing."""
        return self._living.members, bool(self._living.listening)

    @property
    def _every(self) -> CommProcessGroup | None:
        """The group of all ranks, if a sync tells them all that it has ended."""
        return self._living.everyone if self._living.goes_on and len(self._site.ranks) > 1 else None

    def _finish(self) -> Sequence[Head]:
        """Waits for the sync in flight, if there is one, and applies all that the model lacks."""
        heads = self.conclude()
        while self._kept:
            self._arriving.settle()
            ended, before = self._kept.take(), self.shared.trained
            self.shared.apply(ended.outcome, ended.counted)
            if self._has_passed(before):
                break
        return heads

    def conclude(self, *, is_loop: bool = True) -> Sequence[Head]:
        """Waits for the sync in flight, if there is one, and keeps what it means for the model. Returns all heads."""
        if self._sync is None:
            return ()
        self._is_away = not is_loop
        sync, self._sync = self._sync, None
        with self.pace.waiting(sync.head.turn):
            sync, outcome, is_heard = self._ended(sync, pumps=is_loop)
        turn, counted = sync.head.turn, sync.counted()
        self.pace.end(outcome.heads, logs=self._living.group.rank() == 0)
        if not self._arriving.joins:
            own = None if sync.head.is_late else sync
            self._kept.add(Ended(turn, outcome, counted if own or counted.any() else 0.0, own, sync.age))
        else:
            self._arriving.settle()
            self.shared.fragments[self.turns.fragment(turn)].add(counted.neg_())
            self._arriving.keep(Ended(turn, outcome))
        if self._living.goes_on:
            self._last = outcome
        if is_heard and self._living.listening:
            heard = zip(self._living.members, outcome.heads, strict=True)
            self._living.hear({member for member, head in heard if head.is_listening})
            self._arriving.forget(self._living.listening)
        if is_heard and sync.invites:
            self._living.regroup(None, functools.partial(self._meet, None))
        return outcome.heads

    # ---- a loop that is late ----------------------------------------------------------------------------------------

    @property
    def is_flying(self) -> bool:
        """Whether a sync is in flight."""
        return self._sync is not None

    @property
    def has_ended(self) -> bool:
        """Whether a sync is in flight for which nobody has to wait."""
        return self._sync is not None and self._sync.is_done

    @property
    def is_awaited(self) -> bool:
        """Whether another site waits for this one, to make another group."""
        return self._living.is_awaited

    @property
    def may_keep(self) -> bool:
        """Whether there is room for one more outcome."""
        return not self._kept.is_full

    @property
    def sites(self) -> int:
        """Those that may count in a sync."""
        return len(self._living.training)

    @property
    def timeout_s(self) -> float:
        """That of a sync."""
        return self._living.group.timeout.total_seconds()

    def start_late(self) -> None:
        """On behalf of the loop, begins the next sync: the site counts nothing, and its change stays in its weights."""
        difference, buffers = (values.zero_() for values in self.shared.like(self.syncs))
        fragment = self.shared.fragments[self.turns.fragment(self.syncs)]
        digest = 0 if self._kept else fragment.digest()
        invites = self._living.invite()
        head = Head(self.syncs, digest, True, False, 0, 0.0, self._is_listening, invites, is_late=True)
        self._begin(head, difference, buffers)
        self.syncs, self._since, self.is_behind = self.syncs + 1, 0, True

    # ---- after a death ----------------------------------------------------------------------------------------------

    def _ended(self, sync: Sync, *, pumps: bool = True) -> tuple[Sync, Outcome, bool]:
        """Waits for a sync. It has ended on a site when it has on all its ranks. After a death the sites that live
        apply it if one of them has its outcome; else they send it again, each the same values. Returns the sync that
        has ended, its outcome, and whether it ended here, in the present group. `pumps`: keeps states on their way
        meanwhile."""
        while True:
            try:
                outcome = self._site.agreed(functools.partial(self._outcome, sync, pumps=pumps))
            except LOST as error:
                if not self._site.shares(error):
                    raise
                found = self._living.regroup(error, functools.partial(self._meet, sync))
                if found is not None:
                    return sync, found, False
                sync = self._again(sync)
            else:
                return sync, outcome, True

    def _outcome(self, sync: Sync, *, pumps: bool) -> Outcome:
        if not sync.has_begun:
            sync.start()
        while pumps and self._arriving.is_busy and not sync.is_done:
            if not self._pump():
                time.sleep(PAUSE_S)
        outcome = sync.finish()
        heads = zip(sync.ranks, outcome.heads, strict=True)
        self._weights.check_told({rank: Told.of(head) for rank, head in heads})
        return outcome

    def _again(self, sync: Sync) -> Sync:
        """The same sync in the present group; it has not begun."""
        head = sync.head._replace(invites=False)  # those have joined in the new group
        ranks, has_listeners = self._others
        return dataclasses.replace(
            sync,
            group=self._living.group,
            head=head,
            ranks=ranks,
            has_listeners=has_listeners,
            every=self._every,
        )

    def _meet(self, sync: Sync | None) -> Outcome | None:
        """All sites of the new group call, with their sync that has not ended. Returns its outcome, if another site has
        it.

        A site begins a sync when it has the outcome of the one before, so that is the only one that others may lack.
        """
        group, members = self._living.group, self._living.members
        self._arriving.catch_up()
        own = Report(
            self.syncs if sync is None else sync.head.turn,
            None if self._last is None else (self._last.heads, self._last.is_rest),
            self._arriving.lacks,
            self._is_listening,
            self._is_away,
            self._arriving.report(),
        )
        told = told_by_all(group, own)
        reports: dict[int, Report] = dict(zip(members, told, strict=True))
        self._living.hear({member for member, each in reports.items() if each.is_listening})
        most = max(each.ended for each in told)
        outcome = outcome_of(group, told, self._last, lambda: self.shared.like(most - 1))
        if own.ended < 0:
            self.syncs = most
        self._arriving.match(self._living, reports)
        return outcome

    # ---- a site that joins -----------------------------------------------------------------------------------------

    def join(self) -> tuple[Mapping[str, Any], int]:
        """Meets the sites of a training in their new group. Returns when this site has all that they have, and they
        have just begun a turn: what `course` had told there, and how many steps ago. Raises ClosedError if they end the
        training before."""
        self.syncs, self._is_listening = -1, True
        self._arriving.begin()
        self._site.agreed(lambda: self._meet(None))
        try:
            self._catch_up()
            told = self._site.told(self._arriving.told)[0]  # other places may have that of a later step
        except ClosedError:
            raise  # on all of them
        except BaseException as error:
            self._site.abort(error)  # the site's other ranks may wait for this one elsewhere
            raise
        self._arriving.end()
        made = told["steps"] - 1  # it was told before the schedule's step
        self.steps = max(self.turns.steps(self.syncs - 1), made)  # as the others: its syncs begin with theirs
        return told["course"], self.steps - made

    def _catch_up(self) -> None:
        """Makes syncs until this site has all that the others have."""
        together, are_leaving = 0, False
        while are_leaving or self._site.has_any(not self._arriving.is_complete):
            while self._arriving.is_full and self._pump(waits=True):
                pass
            self._start(is_leaving=True)
            are_leaving = all(head.is_leaving for head in self._finish())
            together = together + 1 if are_leaving else 0
            if together == self.turns.fragments:
                self._site.agreed(self._close)
                raise ClosedError("LocalSteps: the training has ended before this site had its state")
            self._pump()

    def _pump(self, *, waits: bool = False) -> bool:
        """Keeps states on their way; whether this site has got on. The sync, too, finds a site that has died. `waits`:
        first waits for a piece."""
        with contextlib.suppress(*LOST):
            return self._arriving.pump(may_pack=not self._kept, waits=waits)
        return False

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, as of the syncs in the model. This rank's part of a sync after them is saved, too, whether
        it is in flight or has ended."""
        with self._loop(is_state=True):
            sync = self._kept.first.own if self._kept else self._sync
            if sync is not None and sync.head.is_late:
                sync = None
            flying: dict[str, Any] | None = None
            if sync is not None:
                flying = {"difference": sync.difference.clone(), "buffers": sync.buffers.clone()}
                flying |= {"head": list(sync.head), "age": self._kept.first.age if self._kept else sync.age}
            return {
                **tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, self.shared.state()),
                "steps": self.steps,
                "syncs": self.shared.syncs + (flying is not None),
                "is_behind": self.is_behind,
                "turn_steps": self._since,
                **self._tally.state(),
                "sync": flying,
            }

    def restore(self, state: Mapping[str, Any], turns: Turns) -> None:
        """Takes over the value of `state_dict`, of a training with these turns, before the first step. Raises
        ConfigError for that of another model."""
        self.steps, self.syncs, self.is_behind = state["steps"], state["syncs"], state.get("is_behind", False)
        self.shared.restore(state, self.syncs - (state["sync"] is not None))
        self.pace.turns = self.turns.resumed(turns, self.syncs)
        self._tally.restore(state)
        self._since = state.get("turn_steps", self._tally.steps[self.turns.fragment(self.syncs - 1)])

    def resume(self, flying: Mapping[str, Any]) -> None:
        """Sends this rank's part of a saved sync again, which no rank has applied."""
        head = Head(*flying["head"])._replace(is_listening=False, invites=False)
        if self._bell is not None:
            self._bell.ring(head.turn)  # others may not have begun it when they saved
        self._begin(head, flying["difference"].clone(), flying["buffers"].clone(), flying["age"])
