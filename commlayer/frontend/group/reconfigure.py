"""`ReconfigurableGroup`: a WORLD that gets other members in place: torch's `_reconfigure`, since torch 2.14.

Each WORLD that it has been is a job of its own, on an engine of its own: so its members may come from several WORLDs,
or from none. gloo beneath is reconfigured, too, since torch takes its rank and size for those of the group.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...config import Config, Policy, policy_of_groups
from ...dynamo import untraced
from ...errors import ClosedError, CommError, ConfigError
from ...transport.accord import store_errors
from ...transport.bootstrap import Rendezvous
from ...transport.store_link import limit
from ..work.work import CommWork
from .backend import CommProcessGroup
from .gathering import CALL, Gathering, MemberHandle, members_of
from .gloo import ReconfigurableGloo
from .split import forget_names


class UnmadeError(ClosedError, AttributeError):
    """The group has no members yet. An AttributeError, so that `hasattr` is False."""


@untraced
class ReconfigurableGroup(CommProcessGroup):
    """What `init_process_group("commlayer", enable_reconfigure=True)` makes. It meets nobody: until the first
    `reconfigure` operations raise ClosedError, and its rank and size are those that were given."""

    supports_reconfigure = True
    supports_shrinking = False

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, policy: Policy | None
    ) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]  # as in CommProcessGroup
        self._begin(store, name, range(size))
        self.devices = None
        self.policy = policy or policy_of_groups(Config.from_environment())
        self._beneath = ReconfigurableGloo(rank, size, timeout)
        self._gloo = self._beneath.group
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._process = os.getpid()
        self._busy = threading.Lock()
        self._root = dist.PrefixStore(f"commlayer/{CALL}", store)
        self._uuids: set[int] = set()
        with store_errors(lambda text: CommError(f"rank {rank}: {text}")):
            token = self._root.compare_set("token", "", secrets.token_hex(8)).decode()
        self._handle = MemberHandle.own(rank, token)

    def __getattr__(self, name: str) -> Any:
        if "_native" not in vars(self):
            raise UnmadeError(
                f"rank {self._ranks[self.rank()]}: this WORLD has no members yet, since it was made with "
                f"enable_reconfigure=True; call dist._reconfigure(uuid, handles) on all of them first"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_reconfigure_handle(self) -> str:
        """The handle of this process in its present WORLD; another one after each `reconfigure`. It names the process,
        the host and the Store."""
        self._check()
        return str(self._handle)

    def reconfigure(self, opts: Any) -> CommWork:
        """Makes this the WORLD of the processes whose handles are given; each of them calls it, with the same ones and
        the same uuid, which no other call has used. Members of the present WORLD that are not among them may be dead.

        Ranks follow the order of a list; of a set, processes keep the order of their present ranks. Operations in
        flight fail with AbortedError, here and on members of the present WORLD, once all have agreed. Other groups are
        gone then. The returned work has ended.

        Raises ConfigError for wrong arguments, and a uuid that this process has used; the errors of `Gathering.agree`,
        after which the group is as it was; PeerLostError if a member dies later, and the errors of a new group, after
        which the group has no members: call again with another uuid. The timeout is that of `opts`, or of the group.
        """
        self._check()
        if opts.hints:
            raise ConfigError(f"{CALL}: hints={dict(opts.hints)!r}: commlayer knows none; pass none")
        self._check_devices()
        members = members_of(opts.handles, self._handle)
        rank, uuid = members.index(self._handle), int(opts.uuid)
        if not self._busy.acquire(blocking=False):
            raise ConfigError(
                f"{CALL}: uuid={uuid}: another thread of this process reconfigures the group; wait for it"
            )
        try:
            if uuid in self._uuids:
                raise ConfigError(
                    f"{CALL}: uuid={uuid} was already used by this process (rank {self.rank()}); pass another one"
                )
            self._uuids.add(uuid)
            timeout = self.timeout if opts.timeout is None else opts.timeout
            end_s = time.monotonic() + timeout.total_seconds()
            silence_s = Config.from_environment().peer_timeout_s
            limit(self._root, silence_s)
            gathering = Gathering(self._root, members, rank, uuid, silence_s)
            with gathering.attempt():
                gathering.agree(timeout.total_seconds())
                self._leave(uuid)
                left = timedelta(seconds=max(end_s - time.monotonic(), 0.001))
                self._meet(gathering, rank, len(members), uuid, left)
        finally:
            self._busy.release()
        return CommWork(None, [])

    def exclude(self, *_: Any, **__: Any) -> str:
        """Raises ConfigError: `reconfigure` does it."""
        raise ConfigError(
            "shrink_group: this WORLD is reconfigurable; call dist._reconfigure with the handles that stay"
        )

    def _check(self) -> None:
        if os.getpid() != self._process or self._is_shut_down:
            raise ClosedError(
                f"{CALL}: the group is destroyed, or belongs to the parent of this process; make a new one"
            )

    def _check_devices(self) -> None:
        whole = str(c10d._world.pg_map[self][0]) if self in c10d._world.pg_map else ""
        names = {entry.rpartition(":")[2] for entry in whole.split(",")}
        if len(names) > 1:
            raise ConfigError(f"{CALL}: backend={whole!r}: a group of several backends cannot; name 'commlayer' alone")

    def _leave(self, uuid: int) -> None:
        """Ends this WORLD here, and all groups of its ranks."""
        reason = f"rank {self.rank()} reconfigured its WORLD (uuid {uuid})"
        if self is dist.group.WORLD:
            others = [group for group in c10d._world.pg_map if group is not self]
            for group in others:
                if isinstance(group, CommProcessGroup):
                    group.abort(reason)
            if others:
                c10d._destroy_all_other_groups(exclude_group=self)
        self.abort(reason)

    def _meet(self, gathering: Gathering, rank: int, size: int, uuid: int, timeout: timedelta) -> None:
        self._ranks = range(size)
        with gathering.watched():
            rendezvous = Rendezvous(gathering.store, self._name, rank, size, timeout)
            self._open(rendezvous, self.timeout, (), self.policy, own_job=True)
        self.closed = False
        forget_names(self)
        self._handle = dataclasses.replace(self._handle, rank=rank, uuid=uuid)
        self._store = dist.PrefixStore("groups", gathering.store)
        if self is dist.group.WORLD:  # what torch knows of it: new groups have the same names and Store on all members
            c10d._world.pg_map[self] = (c10d._world.pg_map[self][0], self._store)
            c10d._world.pg_group_ranks[self] = {member: member for member in range(size)}
            c10d._world.group_count = 1

    def _connect_gloo(self, rendezvous: Rendezvous, timeout: timedelta) -> Any:  # noqa: ARG002  # it keeps its timeout
        return self._beneath.connect(rendezvous, self._native.interface)

    def abort(self, reason: str = "") -> None:
        """As of `CommProcessGroup`; `reconfigure` makes another WORLD afterwards."""
        if "_native" in vars(self):
            super().abort(reason)

    def shutdown(self) -> None:
        """As of `CommProcessGroup`."""
        if "_native" in vars(self):
            super().shutdown()
        self._is_shut_down = self.closed = True
