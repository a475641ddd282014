"""`Living`: the sites that live, and their group. After a death the others go on in a new one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...errors import AbortedError, CommError, OperationTimeoutError, PeerLostError
from ...transport.store_link import root_of
from ..group.backend import CommProcessGroup
from ..group.options import Options
from ..group.party import ATTEMPTS, Party, here, introduce
from ..group.split import subgroup
from .meeting import is_on_all, on_all

LOST = (PeerLostError, AbortedError, OperationTimeoutError)
"""Errors of a sync after which the other sites can go on: a site died, ended its `with` by an exception, or hangs."""

log = logging.getLogger("commlayer")

MetT = TypeVar("MetT")


class Living:
    """At first all sites, which `group` connects. `ranks`: their ranks in the job."""

    def __init__(self, group: CommProcessGroup, ranks: Sequence[int]) -> None:
        self.group = group
        self.ranks = list(ranks)
        """Those of the sites that live, in the job, as of the last sync that has ended."""
        self.is_finished = False
        """Whether another site has said that all have made the last sync."""
        self._least = 0
        self._party: Party | None = None

    def watch(self, min_sites: int, silence_s: float) -> None:
        """From now on, the others go on after a death, unless they are fewer than `min_sites`. All ranks of the group
        call; each is a site of its own. `silence_s`: as of a `Party`."""
        group = self.group
        token, places = introduce(group)
        store = root_of(c10d._world.pg_map[c10d._get_default_group()][1])
        party = Party(store, f"commlayer/local/{token}", dist.get_rank(), here(), silence_s)
        party.members = self.ranks  # errors name ranks of the job
        party.timeout_s = group.timeout.total_seconds()
        party.add({rank: places[at] for at, rank in enumerate(party.members)})
        self._party, self._least = party, min_sites
        self._backend, self._name = str(c10d._world.pg_map[group][0]), f"{group.group_name}:sites"
        self._options = Options(group.policy, timeout=group.timeout)

    @property
    def goes_on(self) -> bool:
        """Whether the others go on after a death."""
        return self._party is not None

    def regroup(self, error: CommError, meet: Callable[[], MetT]) -> MetT | None:
        """After `error` of an operation: makes a new group of the sites that live, then calls `meet` in it. All of them
        call, each when an operation has failed there. Returns what `meet` returns; None after `finish` of another site.
        A site that did not come to an operation within the timeout is taken for dead.

        Raises `error` if the training cannot go on; PeerLostError, on all that live, if these are fewer than
        `min_sites`, and on a site without which the others have gone on.
        """
        if self._party is None or is_on_all(error):
            raise error
        party = self._party
        late = {rank for rank in party.members if isinstance(error, OperationTimeoutError) and rank == error.culprit}
        for _ in range(ATTEMPTS):
            verdict = party.agree(late - {party.own})
            if verdict is None:
                self.is_finished = True
                return None
            if party.own in verdict.gone:
                raise PeerLostError(
                    f"{self._who}: the other sites took this one for dead and have gone on without it; end this process"
                ) from error
            party.pulse.forget(verdict.gone)
            party.members = [member for member in party.members if member not in verdict.gone]
            gone, left = sorted(verdict.gone), party.members
            if len(left) < self._least:
                found = f"rank(s) {gone} are gone, and {left} are fewer than min_sites={self._least}"
                raise on_all(PeerLostError(f"{self._who}: {found}; restore a checkpoint"), gone[0]) from error
            log.warning("%s goes on with the sites of rank(s) %s, without %s", self._who, left, gone)
            self._end()
            try:
                self._make(left)
                return meet()
            except LOST as again:
                log.warning("%s tries again: %s", self._who, again)
        raise PeerLostError(f"{self._who}: no group in {ATTEMPTS} attempts; look at the other ranks' logs") from error

    def _make(self, ranks: list[int]) -> None:
        assert self._party is not None  # noqa: S101  # for mypy
        with self._party.meeting():
            self.group = subgroup(
                ranks,
                self._backend,
                f"{self._name}:{self._party.generation}",
                self._options,
                self._options._timeout,
                self.group.group_desc,
            )
        self.ranks = ranks

    def _end(self) -> None:
        """Ends the group here, and its operations on all other ranks."""
        if self.group in c10d._world.pg_map:
            self.group.abort()
            dist.destroy_process_group(self.group)

    @property
    def _who(self) -> str:
        return f"rank {dist.get_rank()}: LocalSteps"

    def withdraw(self) -> None:
        """This site makes no more syncs, after an error: the others need not wait until it is dead."""
        if self._party is not None:
            self._party.survivors().withdraw()

    def finish(self) -> None:
        """Tells those that do not know it yet that all have made the last sync."""
        if self._party is not None:
            self._party.survivors().finish()

    def unwatch(self) -> None:
        """Ends the thread that watches the others. Idempotent."""
        if self._party is not None:
            self._party.pulse.close()

    def close(self) -> None:
        """Leaves the group, and watches the others no more. Idempotent."""
        self.unwatch()
        if self.group in c10d._world.pg_map:
            dist.destroy_process_group(self.group)
