"""`Sites`: all ranks of all sites, which agree on those that are gone. A site goes as a whole."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...errors import ClosedError
from ...transport.store_link import connection, root_of
from ..group.backend import CommProcessGroup
from ..group.party import Party, Place, here
from ..group.told import told_by_all
from .site import Site


class Sites(Party):
    """Their numbers are ranks of the job; those of sites that have joined are above."""

    JOB = "commlayer/local"
    OPENS = "LocalSteps(min_sites=) makes it one, once local steps have begun"
    KEEPS_WORLD = True
    is_stopped = False
    """Whether this process comes to no more meetings."""

    def __init__(self, root: dist.Store, token: str, own: int, place: Place, silence_s: float) -> None:
        super().__init__(root, token, own, place, silence_s)
        self._first: list[list[int]] = []  # those at the start
        self._base = 0  # the first number above them

    @classmethod
    def meet(cls, group: CommProcessGroup, site: Site, silence_s: float) -> Sites:
        """The first ones of a training. All ranks call; `group` connects those of this place."""
        of_site = site.told((dist.get_rank(), here(), secrets.token_hex(8)))
        told = sorted(told_by_all(group, of_site), key=lambda each: each[0][0])  # the same order at all places
        # Of its own: a loop that is away in a `wait` of the job's Store holds no agreement up.
        store = connection(root_of(c10d._world.pg_map[c10d._get_default_group()][1]), silence_s)
        found = cls(store, told[0][0][2], dist.get_rank(), here(), silence_s)
        found._first, found._base = [[rank for rank, _, _ in each] for each in told], dist.get_world_size()
        found.members = [rank for each in told for rank, _, _ in each]
        found.timeout_s = group.timeout.total_seconds()
        found.add({rank: place for each in told for rank, place, _ in each})
        return found

    @property
    def sites(self) -> list[list[int]]:
        """The members by site, those of a site by their places."""
        return [site for member in self.members if (site := self.site_of(member))[0] == member]

    def site_of(self, member: int) -> list[int]:
        """That of a member. The numbers of a site that has joined follow each other."""
        if member < self._base:
            return next(site for site in self._first if member in site)
        size = len(self._first[0])
        begin = member - (member - self._base) % size
        return list(range(begin, begin + size))

    def whole(self, members: Collection[int]) -> set[int]:
        return {each for member in members for each in self.site_of(member)}

    def roster(self) -> dict[str, Any]:
        return {**super().roster(), "first": self._first, "base": self._base}

    def follow(self, roster: Mapping[str, Any]) -> None:
        self._first, self._base = roster["first"], roster["base"]
        super().follow(roster)

    def dead(self, watched: Collection[int]) -> set[int]:
        """Members look again and again while they agree and meet. Raises ClosedError once this one is stopped."""
        if self.is_stopped:
            raise ClosedError(f"rank {self.own}: LocalSteps: this site ends, and makes no other group")
        return super().dead(watched)
