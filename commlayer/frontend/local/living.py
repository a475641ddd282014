"""`Living`: the sites that live, and their group. After a death the others go on in a new one, and so do all when a
site joins."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...config import Config, Policy
from ...errors import AbortedError, ClosedError, CommError, ConfigError, OperationTimeoutError, PeerLostError
from ...transport.native import Engine
from ...transport.store_link import root_of
from ..group.backend import CommProcessGroup
from ..group.newcomers import JOIN_S, Newcomers, ask, settings_of
from ..group.party import ATTEMPTS, Party, here, introduce
from .meeting import is_on_all, on_all
from .turns import Turns

LOST = (PeerLostError, AbortedError, OperationTimeoutError)
"""Errors of a sync after which the other sites can go on: a site died, ended its `with` by an exception, or hangs."""

PATIENCE = timedelta(days=365)
"""Timeout of the operations of a site that joins. It begins a sync as soon as the last one has ended. The others do so
a turn later, which may take longer than their timeout; they find those who hang."""

DESCRIPTION = "commlayer.LocalSteps"
"""That of the groups, for errors."""

log = logging.getLogger("commlayer")

MetT = TypeVar("MetT")


class Sites(Party):
    """The sites of a training. Their numbers are ranks of the job; those of sites that have joined are above."""

    JOB = "commlayer/local"
    OPENS = "LocalSteps(min_sites=) makes it one, once local steps have begun"
    is_stopped = False
    """Whether this process comes to no more meetings."""

    def dead(self, watched: Collection[int]) -> set[int]:
        """Members look again and again while they agree and meet. Raises ClosedError once this one is stopped."""
        if self.is_stopped:
            raise ClosedError(f"rank {self.own}: LocalSteps: this site ends, and makes no other group")
        return super().dead(watched)


class Living:
    """At first all sites, which `group` connects. `ranks`: their ranks in the job."""

    def __init__(self, group: CommProcessGroup | None, ranks: Sequence[int]) -> None:
        self._group = group
        self.members = list(ranks)
        """The numbers of the sites in the group, by rank."""
        self.listening: set[int] = set()
        """Those of them that have joined, and count in no sync yet."""
        self.is_finished = False
        """Whether another site has said that all have made the last sync."""
        self.token = ""
        """The name of this training: torch gives a later group of the same ranks the same part of the Store."""
        self._least = 0
        self._is_joining = group is None
        self._gone: list[int] = []  # those of the latest deaths
        self._party: Sites | None = None
        self._newcomers: Newcomers | None = None
        self._engine: Engine | None = None

    def watch(self, min_sites: int, silence_s: float) -> None:
        """From now on, the others go on after a death, unless they are fewer than `min_sites`. All ranks of the group
        call; each is a site of its own. `silence_s`: as of a `Party`."""
        group = self.group
        token, places = introduce(group)
        store = root_of(c10d._world.pg_map[c10d._get_default_group()][1])
        party = Sites(store, token, dist.get_rank(), here(), silence_s)
        party.members = self.members  # errors name ranks of the job
        party.timeout_s = group.timeout.total_seconds()
        party.add({rank: places[at] for at, rank in enumerate(party.members)})
        self._follow(party, min_sites, group.policy)

    def _follow(self, party: Sites, min_sites: int, policy: Policy) -> None:
        self._party, self._least, self._policy = party, min_sites, policy
        # Between two groups this process stays what it is: another engine would be another life of its number.
        self._engine = Engine.shared(Config.from_environment())

    @property
    def group(self) -> CommProcessGroup:
        """The present one."""
        assert self._group is not None  # noqa: S101  # for mypy
        return self._group

    @property
    def ranks(self) -> list[int]:
        """The numbers of the sites that train, as of the last sync that has ended."""
        return [member for member in self.members if member not in self.listening]

    @property
    def goes_on(self) -> bool:
        """Whether the others go on after a death."""
        return self._party is not None

    @property
    def party(self) -> Sites:
        """The sites that watch each other. Only where the others go on after a death."""
        assert self._party is not None  # noqa: S101  # for mypy
        return self._party

    @property
    def store(self) -> Any:
        """A part of the Store that all sites share, also with those that join."""
        if self._party is not None:
            return self._party.store("turns")
        return dist.PrefixStore(self.token, self.group.get_group_store())

    @property
    def is_awaited(self) -> bool:
        """Whether another site waits for this one, to make another group."""
        return self._party is not None and self._party.survivors().is_awaiting()

    # ---- sites that join ----

    def open(self, settings: Mapping[str, Any], turns: Turns) -> None:
        """From now on, processes with these settings may join. All sites call."""
        self.store.set("turns", json.dumps(dataclasses.astuple(turns)))
        self._newcomers = Newcomers(self.party)
        self._newcomers.open(settings_of(settings, self.party.token), dist.get_world_size())

    @property
    def turns(self) -> Turns:
        """Those of the training that this site joins."""
        return Turns(*json.loads(self.store.get("turns")))

    def invite(self) -> bool:
        """Whether processes wait that join after this sync. One site looks."""
        if self._newcomers is None:
            return False
        self._newcomers.invites = self.ranks[:1] == [self.party.own]
        return self._newcomers.invites and self._newcomers.invite()

    @classmethod
    def join(
        cls,
        store: dist.Store,
        settings: Mapping[str, Any],
        min_sites: int,
        policy: Policy,
        silence_s: float,
        begin: Callable[[Living], None],
    ) -> Living:
        """Asks to join a training on this Store that has these settings, until `begin` has returned, which is called in
        a group with the others. Raises the errors of `ask` and of `begin`, but those after which it can ask again."""
        for _ in range(ATTEMPTS):
            party = ask(Sites, store, lambda token: settings_of(settings, token), here(), silence_s, JOIN_S)
            living = cls(None, [])
            living._follow(party, min_sites, policy)
            try:
                living._make()
                living._newcomers = Newcomers(party)
                living._newcomers.follow()
                begin(living)
                living._is_joining = False
                living.group.set_timeout(timedelta(seconds=party.timeout_s))
            except BaseException as error:
                living.withdraw()
                living.close(ended=False)
                is_lasting = isinstance(error, (ConfigError, ClosedError)) or is_on_all(error)
                if is_lasting or not isinstance(error, CommError):
                    raise
                log.warning("LocalSteps asks again to join: %s", error)
            else:
                return living
        raise PeerLostError(f"this site could not join in {ATTEMPTS} attempts; look at the logs of the sites")

    # ---- another group ----

    def regroup(self, error: CommError | None, meet: Callable[[], MetT]) -> MetT | None:
        """After `error` of an operation, or None where sites join: makes a new group of the sites that live and join,
        then calls `meet` in it. All of them call, each when an operation has failed there. Returns what `meet` returns;
        None after `finish` of another site. A site that did not come to an operation within the timeout is taken for
        dead. A site that joins and cannot come to that meeting is not waited for again.

        Raises `error` if the training cannot go on; PeerLostError on a site without which the others have gone on, and
        as `hear`.
        """
        if self._party is None or (error is not None and is_on_all(error)):
            assert error is not None  # noqa: S101  # for mypy
            raise error
        party, newest = self._party, list[int]()
        late = {rank for rank in party.members if isinstance(error, OperationTimeoutError) and rank == error.culprit}
        for _ in range(ATTEMPTS):
            verdict = party.agree({*late, *newest} - {party.own})
            if verdict is None:
                self.is_finished = True
                return None
            if party.own in verdict.gone:
                raise PeerLostError(
                    f"{self._who}: the other sites took this one for dead and have gone on without it; end this process"
                ) from error
            party.pulse.forget(verdict.gone)
            if self._newcomers is not None:
                newest = self._newcomers.admit(verdict)
            else:
                party.members = [member for member in party.members if member not in verdict.gone]
            self._gone = sorted(verdict.gone) or self._gone
            change = f"without {sorted(verdict.gone)}" if verdict.gone else f"as {newest} join"
            log.warning("%s goes on with the sites of rank(s) %s, %s", self._who, party.members, change)
            self._end()
            try:
                self._make()
                found = meet()
            except CommError as again:
                if (not newest and not isinstance(again, LOST)) or is_on_all(again):
                    raise
                log.warning("%s tries again: %s", self._who, again)
            else:
                party.pulse.trust()
                return found
        raise PeerLostError(f"{self._who}: no group in {ATTEMPTS} attempts; look at the other ranks' logs") from error

    def hear(self, listening: Collection[int]) -> None:
        """These sites count in no sync yet. All sites of the group have told that. Raises PeerLostError, on all of
        them, if those that count are fewer than `min_sites`."""
        self.listening = set(listening)
        if len(self.ranks) < self._least:
            found = f"rank(s) {self._gone} are gone, and {self.ranks} are fewer than min_sites={self._least}"
            culprit = self._gone[0] if self._gone else self.members[0]
            raise on_all(PeerLostError(f"{self._who}: {found}; restore a checkpoint"), culprit)

    def _make(self) -> None:
        party = self.party
        with party.meeting():
            self._group = CommProcessGroup(
                party.store(f"group {party.generation}"),
                party.members.index(party.own),
                len(party.members),
                timedelta(seconds=party.timeout_s),
                f"{DESCRIPTION}:{party.generation}",
                party.members,
                self._policy,
            )
        self._group._set_group_desc(DESCRIPTION)
        if self._is_joining:
            self._group.set_timeout(PATIENCE)
        self.members = list(party.members)
        party.dead(())  # `stop` may have come before there was a group that `abort` ends

    def _end(self) -> None:
        """Ends the group here, and its operations on all other ranks."""
        if self._group is not None:
            self._group.abort()
            self._leave()

    def _leave(self) -> None:
        if self._group in c10d._world.pg_map:
            dist.destroy_process_group(self._group)
        elif self._group is not None:
            self._group.shutdown()  # torch does not know a group whose sites have no common WORLD

    @property
    def _who(self) -> str:
        return f"rank {self.party.own}: LocalSteps"

    # ---- the end ----

    def stop(self) -> None:
        """Another thread that makes a group gives up, with ClosedError."""
        if self._party is not None:
            self._party.is_stopped = True

    def abort(self) -> None:
        """Ends the operations of the group, on all ranks: the others would wait for this site's next sync."""
        if self._group is not None:
            self._group.abort()

    def withdraw(self) -> None:
        """This site makes no more syncs, after an error: the others need not wait until it is dead."""
        if self._party is not None:
            self._party.survivors().withdraw()
        self.abort()

    def finish(self) -> None:
        """Tells those that do not know it yet that all have made the last sync."""
        if self._party is not None:
            self._party.survivors().finish()

    def unwatch(self, *, ended: bool = False) -> None:
        """Ends the threads that watch the others. Idempotent. `ended`: no site trains on, so none can join."""
        if self._newcomers is not None:
            self._newcomers.close(ended=ended)
            self._newcomers = None
        if self._party is not None:
            self._party.pulse.close()

    def close(self, *, ended: bool) -> None:
        """Leaves the group, and watches the others no more. Idempotent. `ended`: see `unwatch`."""
        self.unwatch(ended=ended)
        self._leave()
        if self._engine is not None:
            self._engine.release()
            self._engine = None
