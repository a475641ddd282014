"""`Rendezvous` and `connect`: the ranks of a group find each other through the torch Store.

A `Rendezvous` is one meeting of a group's ranks. `connect` uses it to exchange the engines' descriptions (host,
process, addresses), the settings that must agree and the job's secret key, and opens the native group.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from ..config import Config, shared
from ..errors import CommError, ConfigError, MismatchError, OperationTimeoutError
from . import base, blob
from .call import Calls
from .description import FORMAT, check_job, check_peer, printable, read_description
from .group_life import MOVED, GroupLife
from .inquiry import Inquiry
from .log import log
from .members import Members
from .secret import check_secrets, fingerprint, mixed, read_secret
from .store_link import limit, root_of

if TYPE_CHECKING:
    from .native import Engine

JOB = "commlayer/job"
"""The entry with the number and the key of the job whose WORLD was made last on the Store: see `entry`."""
_KEY_BYTES = 16
STORE_S = 5
"""Patience of a tool with the Store of a job."""
_PAIRED = "paired"
_GROUPS_KEY = "commlayer/groups"
_TOP = "commlayer/top"

LEFT = b"~"
"""The value of a rank that waited in vain for another one."""

AGAIN_S = 0.02
"""Pause between looks for ranks that left, and are to come again."""

LEAVE_S = 2.0
"""Longest time, in seconds, for which a process that cannot start serves the Store, so that others learn the reason."""


check_present: ContextVar[Callable[[], None] | None] = ContextVar("commlayer.present", default=None)
"""Raises a CommError once a rank is known to have died while the ranks of a new group meet; None: nobody looks."""

PRESENT_S = 0.02
"""Longest pause between two such looks; the first one is SOON_S, and each is twice as long as the one before."""

SOON_S = 0.0005
"""Far less than the start of a group takes."""


@contextlib.contextmanager
def presence(check: Callable[[], None]) -> Iterator[None]:
    """A context in which ranks that meet call `check` again and again: see `check_present`."""
    token = check_present.set(check)
    try:
        yield
    finally:
        check_present.reset(token)


class Rendezvous:
    """One meeting of the ranks of a group, in a part of the Store that no other meeting has used.

    A start that failed, with a rank missing or dead, leaves nothing that a later one would find (`GroupLife`).

    Rank 0 reads the values of all ranks and publishes them as one: so the Store serves a number of requests that grows
    with the ranks, not with their square.
    """

    def __init__(
        self, store: Store, name: str, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()
    ) -> None:
        """`ranks`: their ranks in the job, by rank of the group; none: the same."""
        self.members = Members(name, rank, ranks or range(size))
        self.rank = rank
        self.size = size
        self.timeout = timeout
        with self._store_errors():
            self._life = GroupLife(store, size, rank)
        self._steps = 0
        self._gave_up = False
        self.stall_s = 0.0
        """Seconds of waiting for other ranks after which a warning names them; 0: there is none."""

    @property
    def store(self) -> PrefixStore:
        """The Store for other keys of the group in this life."""
        return self._life.store

    def exchange(self, step: str, value: bytes) -> list[bytes]:
        """All-gathers the ranks' values, in rank order; it is a barrier, too. All ranks take the same steps.

        Raises OperationTimeoutError, which names the missing ranks, or CommError with the reason why a rank gave up.
        """
        with self._store_errors():
            number = self._publish(b"+" + value)
            if self.rank == 0:
                answers = self._gather(number, step)
            else:
                while (answer := self._answer(number, step)) == MOVED:
                    self._life.follow()
                    self._set(f"{number}/{self.rank}", b"+" + value)
                answers = blob.unpack(answer)
        for rank, answer in enumerate(answers):
            if answer[:1] == b"-":
                host, _, reason = answer[1:].decode().partition("\n")
                who = f"rank {self.members.ranks[rank]} of group {self.members.group!r} on {host}"
                raise CommError(f"{who} could not start: {reason}")
        return [answer[1:] for answer in answers]

    def give_up(self, reason: BaseException) -> None:
        """Makes the next step fail on all ranks at once, not only after the timeout. Idempotent."""
        if self._gave_up:
            return
        self._gave_up = True
        text = printable(f"-{socket.gethostname()}\n{reason}").encode()
        with contextlib.suppress(dist.DistError):  # the Store itself may have failed
            number = self._publish(text)
            if self.rank == 0:
                self._set(f"{number}/all", blob.pack([text]))
            self._leave()
            self._life.close()  # those who came meanwhile have learned the reason in this life

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context for steps of this rank alone: errors name the rank, and the other ranks get them at once."""
        try:
            yield
        except CommError as error:
            self.give_up(error)
            raise type(error)(f"{self.members.who}: {error}") from error
        except Exception as error:
            self.give_up(error)
            raise

    def _leave(self) -> None:
        """Rank 0 leaves last: its process often serves the Store, from which the others learn the reason. Members that
        meet after a death live on and try again: rank 0 must not wait for those that died meanwhile."""
        end = time.monotonic() + (LEAVE_S if check_present.get() is None else 0.0)
        keys = [f"left/{rank}" for rank in range(self.size)]
        self._set(keys[self.rank], b"")
        while self.rank == 0 and not self.store.check(keys) and time.monotonic() < end:
            time.sleep(0.01)

    def _gather(self, number: int, step: str) -> list[bytes]:
        """The values of all ranks, for rank 0, which publishes them."""
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        self._wait(keys, keys, step)
        values = self.store.multi_get(keys)
        end = time.monotonic() + self.timeout.total_seconds()
        while LEFT in values:  # an earlier start ended before this rank came; those ranks come again
            if time.monotonic() >= end:
                raise self._timed_out([rank for rank, value in enumerate(values) if value == LEFT], step)
            time.sleep(AGAIN_S)
            values = self.store.multi_get(keys)
        self._life.close()
        self._set(f"{number}/all", blob.pack(values))
        for key in keys:
            self.store.delete_key(key)
        if number > 0:  # every rank is in this step, so it has read the one before
            self.store.delete_key(f"{number - 1}/all")
        return values

    def _answer(self, number: int, step: str) -> bytes:
        """The values of all ranks, as rank 0 has published them."""
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        self._wait([f"{number}/all"], keys, step)
        return self.store.get(f"{number}/all")

    def _wait(self, awaited: list[str], ranks: list[str], step: str) -> None:
        """Waits for the awaited keys. Raises OperationTimeoutError, which names the ranks whose keys are missing; long
        before, a warning does."""
        left_s = timeout_s = self.timeout.total_seconds()
        if 0 < self.stall_s < timeout_s:
            if self._came(awaited, self.stall_s):
                return
            self._warn(ranks, step)
            left_s -= self.stall_s
        if not self._came(awaited, left_s):
            raise self._timed_out(self._missing(ranks) or [0], step)

    def _timed_out(self, missing: Sequence[int], step: str) -> OperationTimeoutError:
        """The error of this rank, which leaves the life."""
        self._life.close()
        self._set(f"{self._steps - 1}/{self.rank}", LEFT)
        return OperationTimeoutError(
            f"{self.members.who}: {self.members.names(missing)} did not reach step {step!r} of the start within "
            f"{self.timeout.total_seconds():g} s; look at their logs for the reason, or raise the timeout of the "
            f"process group"
        )

    def _came(self, keys: list[str], seconds: float) -> bool:
        """Waits for the keys; False if some did not come."""
        if (check := check_present.get()) is not None:
            end, pause_s = time.monotonic() + seconds, SOON_S
            while not self.store.check(keys):
                check()
                if time.monotonic() >= end:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, PRESENT_S)
            return True
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except dist.DistNetworkError:
            raise
        except RuntimeError:
            return all(self.store.check([key]) for key in keys)  # they may come at the last moment
        return True

    def _missing(self, ranks: list[str]) -> list[int]:
        """The ranks of the group whose keys are missing."""
        return [rank for rank, key in enumerate(ranks) if not self.store.check([key])]

    def _warn(self, ranks: list[str], step: str) -> None:
        """Logs the ranks that have not come; one rank of the group does so."""
        if self.rank != (0 if self.store.check(ranks[:1]) else 1):
            return
        log.warning(
            "%s has waited %g s for %s at step %r of the start; look at their logs and stacks",
            *(self.members.who, self.stall_s, self.members.names(self._missing(ranks) or [0]), step),
        )

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise CommError(
                f"{self.members.who}: the job's Store does not answer: the process that serves it (rank 0, or "
                f"torchrun's agent) is gone; look at its log, and restart the job. ({error})"
            ) from error

    def _publish(self, value: bytes) -> int:
        """Publishes this rank's value of the next step; returns the number of the step."""
        number = self._steps
        self._steps += 1
        self._set(f"{number}/{self.rank}", value)
        return number

    def _set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)  # type: ignore[arg-type]  # bytes pass, the stub says str


def connect(
    rendezvous: Rendezvous,
    config: Config,
    policy: Mapping[str, object],
    *,
    peer: int,
    is_world: bool,
    calls: Calls,
    describe: Callable[[], str],
    own_job: bool = False,
    engine: Engine | None = None,
) -> base.Group:
    """Opens this rank's end of a group; every rank of the group calls it.

    `policy` has the fields of the group's policy. `peer` is the number of this process in the job: its rank in WORLD.
    With `own_job` the group is a job by itself, on an engine of its own: its processes may also be in other jobs.
    `engine`: another one than the process's, for a process whose WORLD is another job than that of the group.
    Errors have the group's `calls`, and the description that `describe` returns.

    Raises ConfigError if this host lacks an interface or device in the settings, or another rank has other settings;
    MismatchError if another rank has another policy; UnreachableError if no packet arrives from a rank;
    OperationTimeoutError if a rank did not come; another CommError if one could not start.
    """
    from . import joining, native, stall  # imported late, so that modules and tests that need no engine load none

    members = rendezvous.members
    rendezvous.stall_s = config.stall_s
    with rendezvous.alone():
        check_peer(peer)
        secret = read_secret(config.secret_file)
        common = shared()
        if engine is not None:
            engine.use()
        else:
            engine = (native.Engine.private if own_job else native.Engine.shared)(config)
        limit(rendezvous.store, config.peer_timeout_s)
    group = None
    try:
        description = {**engine.describe(), "format": FORMAT, "peer": peer}
        description |= {"settings": engine.config.common() | common, "policy": policy}
        description["secret"] = fingerprint(secret, engine.life)
        if engine.second is not None:
            description["second"]["peer"] = peer
        if rendezvous.rank == 0:
            root = rendezvous.store if own_job else root_of(rendezvous.store)
            begins = is_world or own_job
            # Processes that join a job later may have made a WORLD of their own in the same Store.
            job, key, paired = engine.job if engine.job and not begins else _job(root, begins)
            description |= {"job": job, "key": key.hex(), "paired": paired, "group": root.add(_GROUPS_KEY, 1)}
        members.hosts = dict(engine.hosts)
        answers = rendezvous.exchange("describe", json.dumps(description).encode())
        descriptions = [read_description(answer, members, rank) for rank, answer in enumerate(answers)]
        members.hosts = {  # a rank without the engine tells none
            number: str(told["hostname"])
            for number, told in zip(members.ranks, descriptions, strict=True)
            if told.get("hostname")
        }
        engine.hosts |= members.hosts
        agree(members, [told["settings"] for told in descriptions], ConfigError)
        check_job(descriptions[0], members)
        check_secrets(descriptions, members, secret)
        policies = [{f"Policy.{name}": value for name, value in told["policy"].items()} for told in descriptions]
        agree(members, policies, MismatchError)
        group = joining.join_both(
            engine,
            members,
            descriptions,
            rendezvous.exchange,
            job=descriptions[0]["job"],
            key=mixed(bytes.fromhex(descriptions[0]["key"]), secret),
            group=descriptions[0]["group"],
            paired=descriptions[0]["paired"],
        )
        engine.job = descriptions[0]["job"], bytes.fromhex(descriptions[0]["key"]), descriptions[0]["paired"]
        if config.top and peer == 0 and not own_job:
            _announce(root_of(rendezvous.store), descriptions[0]["job"], config.top_address())
        group.diagnosis.describe = describe
        ranks = [told["peer"] for told in descriptions]
        group.diagnosis.inquiry = Inquiry(PrefixStore("inquiry", rendezvous.store), rendezvous.rank, ranks, calls)
        group.diagnosis.waits = stall.watch(group, calls, rendezvous.store, root_of(rendezvous.store))
        return group
    except Exception as error:
        if group is not None:
            engine.use()  # closing the group ends one use
            group.close()
        engine.release()
        rendezvous.give_up(error)
        raise


def settle(rendezvous: Rendezvous, config: Config) -> None:
    """Instead of `connect`, for a group without the engine.

    Raises ConfigError if another rank has other settings, as an engine, and CommError if one could not start.
    """
    described = json.dumps({"format": FORMAT, "settings": config.common() | shared(), "policy": {}}).encode()
    try:
        answers = rendezvous.exchange("describe", described)
        values = [read_description(answer, rendezvous.members, rank) for rank, answer in enumerate(answers)]
        agree(rendezvous.members, [value["settings"] for value in values], ConfigError)
    except Exception as error:
        rendezvous.give_up(error)
        raise


def agree(members: Members, values: Sequence[Mapping[str, object]], kind: type[CommError]) -> None:
    """Raises `kind`, which names ranks and values, if `values` (by rank) differ in an entry. Another version of
    commlayer may have other entries."""
    for what in dict.fromkeys(what for entries in values for what in entries):
        ranks: dict[object, list[int]] = {}
        for rank, entries in enumerate(values):
            value = entries.get(what, "not set")
            ranks.setdefault(str(value) if isinstance(value, (list, dict)) else value, []).append(rank)
        if len(ranks) > 1:
            told = "; ".join(f"{value or repr(value)} on {members.names(which)}" for value, which in ranks.items())
            raise kind(f"{what} differs within group {members.group!r}: {told}; set the same on every rank")


def _job(root: Store, is_world: bool) -> tuple[int, bytes, bool]:
    """The number (64 bits) that keeps the packets of different jobs apart, the key that keeps strangers out, and
    whether former lives of the job may have had the same pair.

    Any process that can read the Store can join the job, unless there is a COMMLAYER_SECRET_FILE: the key is as secret
    as the Store.

    WORLD makes a new pair each time it is made. If WORLD belongs to another backend, the first group of the job puts a
    pair there and the others take it, because groups with a process in common must have the same one. No group can tell
    then when a new life begins, so the pair stays for the following lives.
    """
    made = secrets.randbits(63) | 1, os.urandom(_KEY_BYTES), not is_world
    if is_world:
        root.set(JOB, entry(made))
        return made
    number, key, *rest = root.compare_set(JOB, "", entry(made)).decode().split()
    return int(number), bytes.fromhex(key), rest == [_PAIRED]


def entry(job: tuple[int, bytes, bool]) -> str:
    """The entry of a job in the Store, from which tools take the key. A WORLD that is made on a part of the same Store
    replaces it: prefixes cannot be told from those that torchrun and torch give to each WORLD."""
    number, key, is_paired = job
    return f"{number} {key.hex()}{f' {_PAIRED}' * is_paired}"


def _announce(root: Store, job: int, address: str) -> None:
    """Tells `commlayer top` where the samples of the job are, and the user how to see them; once per address."""
    root.set(f"{_TOP}/{job}", address)
    if root.check([_TOP]) and root.get(_TOP).decode() == address:
        return
    root.set(_TOP, address)
    if isinstance(root, dist.TCPStore):
        log.warning("to watch this job: commlayer top --store %s:%d", root.host, root.port)


def stored_top(host: str, port: int) -> tuple[str, str]:
    """The key of the running job whose TCPStore is there, as hex digits, and the address of its samples. Raises
    ValueError if it has none."""
    store = _job_store(host, port)
    number, key, *_ = store.get(JOB).decode().split()
    if not store.check([f"{_TOP}/{number}"]):
        raise ValueError(f"the job at {host}:{port} gives no samples; start it with COMMLAYER_TOP=PORT on every rank")
    return key, store.get(f"{_TOP}/{number}").decode()


def stored_key(host: str, port: int) -> str:
    """The key of the running job whose TCPStore is there, as hex digits. Raises ValueError if it cannot be had."""
    _, key, *rest = _job_store(host, port).get(JOB).decode().split()
    if rest == [_PAIRED]:
        raise ValueError("each two processes of this job have a key of their own, which is written nowhere")
    return key


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """A context in which nothing that this process writes to the descriptor of stderr arrives."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w", encoding="ascii") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _job_store(host: str, port: int) -> Store:
    """A connection to the Store of a running job. Raises ValueError if there is none."""
    try:
        socket.create_connection((host, port), STORE_S).close()  # torch would try again for 10 s
    except OSError as error:
        raise ValueError(
            f"no Store answers at {host}:{port} ({error.strerror or error}); name the MASTER_ADDR and MASTER_PORT of a "
            "job that runs"
        ) from error
    try:
        with _silent_stderr():  # torch prints pages of its stacks where something else listens
            store = dist.TCPStore(host, port, None, False, timedelta(seconds=STORE_S), wait_for_workers=False)
        known = store.check([JOB])
    except dist.DistError as error:
        raise ValueError(
            f"no Store answers at {host}:{port}; name the MASTER_ADDR and MASTER_PORT of a job that runs"
        ) from error
    if not known:
        raise ValueError(f"the Store at {host}:{port} has no job of commlayer")
    return store
