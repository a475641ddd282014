"""`Membership`: this rank's part in a job whose members go and come."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from ...config import Config
from ...errors import (
    AbortedError,
    ClosedError,
    CommError,
    ConfigError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
)
from ...transport.log import log
from ...transport.native import Engine
from ..group.newcomers import JOIN_S, Newcomers, ask, settings_of
from ..group.party import ATTEMPTS, change, here
from ..group.told import done_by_all, told_by_all
from .replica import Replica
from .rows import Rows, rows_of
from .world import World

DoneT = TypeVar("DoneT")

LOST = (PeerLostError, AbortedError, OperationTimeoutError)
"""Errors of an operation that say that another rank does not come to it."""


class ExcludedError(PeerLostError):
    """The others have gone on without this rank, which has not left."""


class Membership:
    """`first` is the job's first WORLD; None: this process joins a job. `row`: the group of the ranks between which the
    model is divided; None: each rank has all of it."""

    def __init__(self, replica: Replica, first: Any, silence_s: float, row: Any) -> None:
        self._replica, self._first, self._silence_s = replica, first, silence_s
        self._first_size = 0
        """The ranks of the first WORLD; those that join have the numbers from there on."""
        self._row = row
        self._is_together = False
        """The ranks of this row, which joins, have begun to act together."""
        self._world: World | None = None
        self._newcomers: Newcomers | None = None
        self._row_told: list[list[float]] = []
        """What the ranks of this row have told each other last: see `row_fails`."""
        self.leaves = False
        """This rank wants to."""
        self.has_left = False
        self._is_excluded = False
        """The others have agreed to go on without it, which has not left."""
        self.is_closing = False
        """The loops have ended."""
        self.has_ended = False
        """No member goes on."""

    @property
    def is_joined(self) -> bool:
        """Whether there is a `world`."""
        return self._world is not None

    @property
    def world(self) -> World:
        """The present one. Raises ClosedError if this process has not joined yet."""
        if self._world is None:
            raise ClosedError("elastic(join=...): this process is in the job once job.sampler() has returned")
        return self._world

    @property
    def computing(self) -> list[int]:
        """The members that take a share of the batch."""
        return self._replica.computing(self.world.members)

    def begin(self) -> None:
        """All ranks of the first WORLD call. Raises ConfigError as `rows_of`."""
        if self._first is None:
            return
        first = self._first
        self._first_size = first.size()
        rows = rows_of(first, self._row)
        if self._row is None:
            self._world = World.of(first, self._silence_s)
        else:
            self._world = Rows.of_row(first, self._silence_s, rows, self._row)
        self._first = None

    def open(self, settings: Mapping[str, Any]) -> None:
        """From now on, processes with these settings may join."""
        self._newcomers = Newcomers(self.world)
        self._newcomers.open(settings_of(settings, self.world.token), self._first_size)

    def close(self) -> None:
        """Ends the threads."""
        if self._newcomers is not None:
            self._newcomers.close(ended=self.has_ended)
            self._newcomers = None
        if self._world is not None:
            self._world.close()

    def invite(self) -> bool:
        """Whether processes wait that join after this step. One member looks."""
        if self._newcomers is None:
            return False
        self._newcomers.invites = self.computing[:1] == [self.world.own]
        return self._newcomers.invites and self._newcomers.invite()

    def regroup(self, leavers: Collection[int]) -> bool:
        """Makes a new WORLD of the members that live and stay, and of newcomers, and the step that only some of them
        have made. A newcomer that cannot come to that meeting is not waited for again.

        Returns whether nothing is left to do here: this rank has left, or the loops have ended, and another one knows
        that all have made all steps. Raises ExcludedError if the others go on without this rank; ClosedError if they
        have ended while it listened.
        """
        world, newest = self.world, list[int]()
        for _ in range(ATTEMPTS):
            members = world.members
            verdict = world.agree({*leavers, *newest})
            if verdict is None:
                return True
            self.has_ended = verdict.gone >= set(members)
            if world.own in verdict.gone:
                self._go(set(members) - verdict.gone)
                return True
            world.pulse.forget(verdict.gone)
            if self._newcomers is not None:
                newest = self._newcomers.admit(verdict)
            else:
                world.members = [each for each in members if each not in verdict.gone]
            changed = change(verdict.gone, newest)
            log.warning("rank %d goes on with ranks %s, %s", world.own, world.members, changed)
            world.end()
            failed = False
            try:
                self._meet()
            except CommError as error:
                if isinstance(error, (MismatchError, ConfigError)) and not newest:
                    raise
                log.warning("rank %d tries again: %s", world.own, error)
                world.survivors().begin()  # those that still meet, also of this row, wait for it no more
                world.end()
                failed = True
            if not self.row_fails(failed=failed):
                world.pulse.trust()
                return False
            world.end()
            leavers = []
        raise PeerLostError(f"rank {world.own}: no group in {ATTEMPTS} attempts; look at the other ranks' logs")

    def join(self, store: dist.Store, settings: Mapping[str, Any]) -> None:
        """Asks to join, with all ranks of this row, until this rank is a member, which listens."""
        for _ in range(ATTEMPTS):
            self._world = world = self._ask(store, settings)
            self._replica.listen()
            self._is_excluded = False
            obstacle: CommError | None = None
            try:
                try:
                    self._meet()
                except CommError as error:
                    if isinstance(error, (MismatchError, ConfigError)):
                        raise
                    obstacle = error
                    world.survivors().withdraw()  # those that still meet, also of this row, wait for it no more
                    world.end()  # nor those that have met
                fails = self.row_fails(failed=obstacle is not None)
            except BaseException as error:
                self.withdraw(error)
                raise
            if not fails:
                world.pulse.beat()
                self._newcomers = Newcomers(world)
                self._newcomers.follow()
                return
            if obstacle is None:
                world.survivors().withdraw()
            self.ask_again(obstacle or "another rank of its row has not met the others")
        raise PeerLostError(f"this process could not join in {ATTEMPTS} attempts; look at the ranks' logs")

    def _ask(self, store: dist.Store, settings: Mapping[str, Any]) -> World:
        describe = functools.partial(settings_of, settings)
        if self._row is None:
            return ask(World, store, describe, here(), self._silence_s, JOIN_S)
        engines = list[Engine]()
        try:
            # Before the job takes the row in, and waits for it.
            self._together(lambda: engines.append(Engine.private(Config.from_environment())))
            world = ask(Rows, store, describe, here(), self._silence_s, JOIN_S, self._together)
        except BaseException as error:
            for each in engines:
                each.release()
            if not isinstance(error, CommError):
                self._row.abort()
            raise
        world.enter(self._row, engines[0])
        return world

    def done_by_row(self, do: Callable[[], DoneT]) -> DoneT:
        """What `do` returns. All ranks of a row that joins call: if it raises on one of them, all raise an error."""
        return do() if self._row is None or self.is_joined else self._together(do)[self._row.rank()]

    def _together(self, do: Callable[[], DoneT]) -> list[DoneT]:
        """`done_by_all` of this row, which joins. Raises PeerLostError if one of them is gone."""
        self._is_together = True
        try:
            return done_by_all(self._row, do)
        except LOST as error:
            if error.operation is None:
                raise  # all ranks of the row do
            text = f"elastic(join=...): this row cannot join without one of its ranks: {error}"
            raise PeerLostError(text) from error
        except CommError:
            raise
        except BaseException:
            self._row.abort()
            raise

    def end_row(self) -> None:
        """This rank, of a row that was to join, does not ask: its other ranks need not wait for it. Does nothing once
        they act together, and so fail together."""
        if self._row is not None and not self._is_together:
            self._row.abort()

    def row_fails(self, *, failed: bool) -> bool:
        """Whether one of this row has `failed`. All its ranks call: without one of them, the rest of the row would wait
        in the next forward pass. Raises PeerLostError if the row cannot go on."""
        self._row_told = self.world.tell_row([float(failed), *self._replica.progress()])
        return any(each[0] > 0 for each in self._row_told)

    def withdraw(self, error: BaseException) -> None:
        """The others need not wait for this rank, which is in no group any more, because of this error."""
        if not self._is_excluded:  # else the others, which meet already, would begin another agreement
            self.world.tell_end(error)
            self.world.survivors().withdraw()
        self.world.abandon()
        self.close()

    def ask_again(self, reason: CommError | str) -> None:
        """This rank is to join once more, with its row. The others do not wait for it any more."""
        log.warning("rank %d asks again to join: %s", self.world.own, reason)
        self.world.end()
        self.close()

    def _go(self, others: Collection[int]) -> None:
        """This member is among those that are gone."""
        world, own = self.world, self.world.own
        if self.is_closing and self._replica.is_listening:
            self._is_excluded = True
            raise ClosedError(f"rank {own}: the job has ended before this process had its state")
        loss = world.loss(None, others)
        if loss or not (self.leaves or world.is_row_leaving()):
            self._is_excluded = True
            if loss:
                raise PeerLostError(loss)
            whom = "this rank, or one of its row," if world.ARE_DIVIDED else "this rank"
            raise ExcludedError(
                f"rank {own}: rank(s) {', '.join(map(str, sorted(others))) or 'of other rows'} took {whom} for dead "
                f"and have gone on without it; end this process"
            )
        self._replica.follow_row(world, [each[1:] for each in self._row_told])
        world.tell_left()
        self.has_left = True
        log.warning("rank %d has left the job after step %d", own, self._replica.made)

    def _meet(self) -> None:
        """Makes the groups of the members; then all of them have made as many steps."""
        self.world.make()
        self._replica.meet(self.world, told_by_all(self.world.all, self._replica.report()))
