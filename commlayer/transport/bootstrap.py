"""How ranks find each other: everything a group must agree on before its first packet, through the torch Store.

A `Rendezvous` is one meeting of a group's ranks. `connect` uses it to exchange the engines' descriptions (host,
process, addresses), and opens the native group.
"""

from __future__ import annotations

import json
import secrets
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

from ..config import Config
from ..errors import CommError, OperationTimeoutError
from . import base

_JOB_KEY = "commlayer/job"
_GROUPS_KEY = "commlayer/groups"


class Rendezvous:
    """One meeting of the ranks of a group, in a part of the Store that no other meeting has used.

    The same group can be made again in the same Store (torchrun's Store outlives `destroy_process_group`), where the
    keys of its former life would be taken for answers. So the ranks count themselves in: everybody of the n-th life
    arrives before anybody of the next.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout: timedelta) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.timeout = timeout
        life = (store.add("commlayer/arrivals", 1) - 1) // size
        self.store = PrefixStore(f"commlayer/{life}", store)
        """For anything else the group stores during this life."""

    def publish(self, key: str, value: bytes) -> None:
        """This rank's half of `exchange(key, value)`, for a rank that will not wait for the others."""
        self.store.set(f"{key}/{self.rank}", value)  # type: ignore[arg-type]  # bytes pass, the stub says str

    def exchange(self, key: str, value: bytes) -> list[bytes]:
        """All-gather, and thereby a barrier: every rank's value under `key`, in rank order. Use each key once.

        Raises OperationTimeoutError naming the ranks that did not come.
        """
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self.publish(key, value)
        try:
            self.store.wait(keys, self.timeout)
        except RuntimeError as error:
            missing = [str(rank) for rank, each in enumerate(keys) if not self.store.check([each])]
            if not missing:
                raise
            raise OperationTimeoutError(
                f"rank {self.rank} of group {self.name!r}: rank(s) {', '.join(missing)} did not reach step {key!r} of "
                f"the start within {self.timeout.total_seconds():g} s; look at their logs for the reason, or raise "
                f"the timeout of the process group"
            ) from error
        values = self.store.multi_get(keys)
        if self.store.add(f"{key}/read", 1) == self.size:
            for each in (*keys, f"{key}/read"):
                self.store.delete_key(each)
        return values


def connect(rendezvous: Rendezvous, config: Config, *, peer: int, is_world: bool) -> base.Group:
    """Opens this rank's end of a group; every rank of the group calls it.

    `peer` names this process to every other process of the job: its rank in WORLD.
    Raises ConfigError (settings that this host cannot fulfil) or OperationTimeoutError (a rank that did not come).
    """
    from . import native  # here, so that what needs no engine can be used, and tested, without one

    try:
        engine = native.Engine.shared(config)
    except Exception as error:
        rendezvous.publish("describe", json.dumps({"error": str(error)}).encode())
        raise
    try:
        description = dict(engine.describe())
        description["peer"] = peer
        if rendezvous.rank == 0:
            root = _root(rendezvous.store)
            description["job"] = _job(root, is_world)
            description["group"] = root.add(_GROUPS_KEY, 1)
        published = rendezvous.exchange("describe", json.dumps(description).encode())
        descriptions: list[dict[str, Any]] = [json.loads(each) for each in published]
        for rank, each in enumerate(descriptions):
            if "error" in each:
                raise CommError(f"rank {rank} of group {rendezvous.name!r} could not start its engine: {each['error']}")
        return native.NativeGroup.open(
            engine,
            rendezvous.name,
            rendezvous.rank,
            rendezvous.size,
            descriptions,
            descriptions[0]["job"],
            descriptions[0]["group"],
            rendezvous.exchange,
        )
    except BaseException:
        engine.release()
        raise


def _root(store: Store) -> Store:
    """The Store that all groups of the job have in common, under the prefixes torch gives each group."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _job(root: Store, is_world: bool) -> int:
    """The number, 64 bits, that keeps the packets of different jobs apart.

    WORLD makes a new one each time it is made. A group that comes first because WORLD belongs to another backend
    takes what is there, or is first to put one there: groups with a process in common must have the same.
    """
    made = str(secrets.randbits(63) | 1)
    if is_world:
        root.set(_JOB_KEY, made)
        return int(made)
    return int(root.compare_set(_JOB_KEY, "", made))
