"""`Living`: the sites that live, and their groups. After a death the others go on in new ones, and so do all when a
site joins.

One group connects the ranks of this place in all sites, which exchange fragments. Where sites have several ranks, a
second one connects all ranks: a death fails an operation of it everywhere, and not at one place alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...config import Config, Policy
from ...errors import ClosedError, CommError, ConfigError, OperationTimeoutError, PeerLostError
from ...transport.native import Engine
from ...transport.store_link import connection, root_of
from ..group.backend import CommProcessGroup
from ..group.mates import DYING_S, Mates
from ..group.newcomers import JOIN_S, Newcomers, ask, settings_of
from ..group.party import ATTEMPTS, change, here
from ..group.told import told_by_all
from .meeting import LOST, is_on_all, on_all
from .site import Site, is_fault
from .sites import Sites
from .turns import Turns

PATIENCE = timedelta(days=365)
"""Timeout of the operations of a site that joins. It begins a sync as soon as the last one has ended. The others do so
a turn later, which may take longer than their timeout; they find those who hang."""

DESCRIPTION = "commlayer.LocalSteps"
"""That of the groups, for errors."""

log = logging.getLogger("commlayer")

MetT = TypeVar("MetT")


class Living:
    """At first all sites. `group` connects the ranks of this place, whose ranks in the job are `ranks`; None: this site
    joins. `site`: this one."""

    def __init__(self, group: CommProcessGroup | None, ranks: Sequence[int], site: Site) -> None:
        self._group, self._site = group, site
        self._all: CommProcessGroup | None = None  # where sites have several ranks
        self.members = list(ranks)
        """The numbers of this place's ranks in the group, one of each site, by rank."""
        self._sites = [[rank] for rank in ranks]  # all their ranks
        self.listening: set[int] = set()
        """Those of them whose sites have joined, and count in no sync yet."""
        self.is_finished = False
        """Whether another site has said that all have made the last sync."""
        self.token = ""
        """The name of this training, the same at all places."""
        self._least = 0
        self.is_excluded = False
        """Whether the others have gone on without this site."""
        self._is_joining = group is None
        self._gone: list[int] = []  # those of the latest deaths
        self._party: Sites | None = None
        self._newcomers: Newcomers | None = None
        self._engine: Engine | None = None

    def learn_sites(self) -> None:
        """Learns the ranks of all sites, which have several, where a death ends the training. All ranks call."""
        self._sites = sorted(told_by_all(self.group, list(self._site.ranks)))

    def watch(self, min_sites: int, silence_s: float) -> None:
        """From now on, the others go on after a death, unless they are fewer than `min_sites`. All ranks call.
        `silence_s`: as of a `Party`."""
        party = Sites.meet(self.group, self._site, silence_s)
        self._follow(party, min_sites, self.group.policy)
        self._sites = party.sites
        with party.meeting():
            self._all = self._group_of_all()

    def _follow(self, party: Sites, min_sites: int, policy: Policy) -> None:
        self._party, self._least, self._policy = party, min_sites, policy
        self._mates = Mates(party, party.site_of(party.own), "site")
        # Between two groups this process stays what it is: another engine would be another life of its number.
        config = Config.from_environment()
        # A site that joins with a WORLD of its own is another job there, in which its ranks have other numbers.
        self._is_apart = self._is_joining and len(self._mates.ranks) > 1
        self._engine = Engine.private(config) if self._is_apart else Engine.shared(config)

    @property
    def group(self) -> CommProcessGroup:
        """The present one."""
        assert self._group is not None  # noqa: S101  # for mypy
        return self._group

    @property
    def everyone(self) -> CommProcessGroup:
        """The present group of all ranks. Only where the others go on after a death."""
        return self._all or self.group

    @property
    def training(self) -> list[int]:
        """The members whose sites train, as of the last sync that has ended."""
        return [member for member in self.members if member not in self.listening]

    @property
    def ranks(self) -> list[int]:
        """The numbers of all ranks of the sites that train, as of the last sync that has ended."""
        training = set(self.training)
        return [each for site in self._sites if training & {*site} for each in site]

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
    def own_site(self) -> list[int]:
        """The numbers of this site's ranks, by place. One that has joined has others than in its WORLD."""
        return list(self._site.ranks) if self._party is None else self._mates.ranks

    @property
    def store(self) -> Any:
        """A part of the Store that all sites share, also with those that join."""
        if self._party is not None:
            return self._party.store("turns")
        return dist.PrefixStore(f"{DESCRIPTION}/{self.token}", root_of(self.group.get_group_store()))

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
        """Whether processes wait that join after this sync. One rank looks."""
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
        site: Site,
        begin: Callable[[Living], None],
    ) -> Living:
        """Asks to join a training on this Store that has these settings, until `begin` has returned, which is called in
        a group with the others. All ranks of the site call, and ask as one. Raises the errors of `ask` and of `begin`,
        but those after which it can ask again."""
        own = connection(root_of(store), silence_s)
        for _ in range(ATTEMPTS):
            party = ask(Sites, own, lambda token: settings_of(settings, token), here(), silence_s, JOIN_S, site.done)
            living = cls(None, [], site)
            living._follow(party, min_sites, policy)
            try:
                site.agreed(living._make)
                living._newcomers = Newcomers(party)
                living._newcomers.follow()
                site.agreed(functools.partial(begin, living))
                living._is_joining = False
                living._set_timeout(timedelta(seconds=party.timeout_s))
                site.set_timeout(timedelta(seconds=party.timeout_s))
            except BaseException as error:
                living.withdraw(error)
                living.close(ended=False)
                is_lasting = isinstance(error, (ConfigError, ClosedError)) or is_on_all(error) or is_fault(error)
                if is_lasting or not isinstance(error, CommError) or not site.shares(error):
                    raise
                log.warning("LocalSteps asks again to join: %s", error)
            else:
                return living
        raise PeerLostError(f"this site could not join in {ATTEMPTS} attempts; look at the logs of the sites")

    # ---- another group ----

    def regroup(self, error: CommError | None, meet: Callable[[], MetT]) -> MetT | None:
        """After `error` of an operation, or None where sites join: makes a new group of the sites that live and join,
        then calls `meet` in it. All of them call, each when an operation has failed there; the ranks of a site call
        together, and all of them have met, or all try again. Returns what `meet` returns; None after `finish` of
        another site. A site that did not come to an operation within the timeout is taken for dead. A site that joins
        and cannot come to that meeting is not waited for again.

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
                self.is_excluded = True
                raise PeerLostError(
                    self._mates.loss(self._culprit(error), set(party.members) - verdict.gone, DYING_S)
                    or f"{self._who}: the other sites took this one for dead and have gone on without it; end this "
                    f"process"
                ) from error
            party.pulse.forget(verdict.gone)
            if self._newcomers is not None:
                newest = self._newcomers.admit(verdict)
            else:
                party.members = [member for member in party.members if member not in verdict.gone]
            self._gone = sorted(verdict.gone) or self._gone
            changed = change(verdict.gone, newest)
            log.warning("%s goes on with the sites of rank(s) %s, %s", self._who, party.members, changed)
            self._end()
            try:
                found = self._site.agreed(lambda: self._met(meet))
            except CommError as again:
                is_final = (not newest and not isinstance(again, LOST)) or is_on_all(again)
                if is_final or not self._site.shares(again):
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
        if len(self.training) < self._least:
            size = len(self._mates.ranks)
            of = f" sites of {size} ranks" if size > 1 else ""
            found = f"rank(s) {self._gone} are gone, and {self.ranks} are fewer than min_sites={self._least}{of}"
            culprit = self._gone[0] if self._gone else self.members[0]
            raise on_all(PeerLostError(f"{self._who}: {found}; restore a checkpoint"), culprit)

    def _met(self, meet: Callable[[], MetT]) -> MetT:
        self._make()
        return meet()

    def _make(self) -> None:
        party = self.party
        sites = party.sites
        members = [site[self._site.place] for site in sites]
        with party.meeting():
            self._group = self._group_of("group", members)
            self._all = self._group_of_all()
        if self._is_joining:
            self._set_timeout(PATIENCE)
        self.members, self._sites = members, sites
        party.dead(())  # `stop` may have come before there was a group that `abort` ends

    def _set_timeout(self, timeout: timedelta) -> None:
        for group in {self.group, self.everyone}:
            group.set_timeout(timeout)

    def _group_of_all(self) -> CommProcessGroup | None:
        """None: a site is one rank, so the other group connects all."""
        return self._group_of("all", self.party.members) if len(self._mates.ranks) > 1 else None

    def _group_of(self, name: str, ranks: Sequence[int]) -> CommProcessGroup:
        party = self.party
        found = CommProcessGroup(
            party.store(f"{name} {party.generation} of {ranks[0]}"),
            ranks.index(party.own),
            len(ranks),
            timedelta(seconds=party.timeout_s),
            f"{DESCRIPTION}:{party.generation}:{name} of {ranks[0]}",
            ranks,
            self._policy,
            engine=self._engine if self._is_apart else None,
        )
        found._set_group_desc(DESCRIPTION)
        return found

    def _end(self) -> None:
        """Ends the groups here, and their operations on all other ranks."""
        self.abort()
        self._leave()

    def _leave(self) -> None:
        if self._all is not None:
            self._all.shutdown()
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
        """Ends the operations of the groups, on all ranks: the others would wait for this site's next sync."""
        for group in (self._group, self._all):
            if group is not None:
                group.abort()

    def withdraw(self, error: BaseException) -> None:
        """This site makes no more syncs, after an error: the others need not wait until it is dead."""
        if self._party is not None:
            self._mates.give_up(error)
            if not self.is_excluded:  # else the others, which meet already, would begin another agreement
                self._party.survivors().withdraw()
        if not is_on_all(error):
            self.abort()

    def loss(self, error: BaseException, *, silence_s: float, has_begun: bool) -> str:
        """The text of an error, if another rank of this site is gone, and it is not known yet; else it is empty.
        `silence_s`: how long it looks for one. `has_begun`: whether local steps have, without which no site goes on."""
        if self._party is None or self._site.shares(error) or self.is_excluded:
            return ""
        rest = set(self._party.members) - self._party.whole(self._dead()) if has_begun else None
        return self._mates.loss(self._culprit(error), rest, silence_s)

    def _culprit(self, error: BaseException | None) -> int | None:
        """The number of the rank that an error names. A site that has joined has errors of two jobs."""
        return error.culprit if isinstance(error, CommError) and not self._is_apart else None

    def _dead(self) -> set[int]:
        """Other members that have ended, or are silent. None without a Store."""
        with contextlib.suppress(RuntimeError):
            return self.party.pulse.dead(set(self.party.members) - {self.party.own})
        return set()

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
