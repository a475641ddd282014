"""`Change`: one setting that `commlayer ctl` changes on all ranks; `Mailbox`: its way to the training thread.

The agent of each rank checks a change and puts it into the mailbox. Hooks take it from there once all ranks have it:
`frontend.gradients.changes` agrees on that over the job's own network.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CommError, ConfigError
from ..transport.native import Engine
from .entry import read
from .meter import meter

POLICY = {"loss-bound": "loss_bound", "codec": "codec", "priority": "priority"}
"""Settings of a hook's policy that can change in a running job, and their fields."""

PORTS = ("pause", "resume")
"""Changes of an interface."""

REFUSED = {
    "treatment": "residuals of the other treatment would stay unused; restart with the new Policy",
    "algorithm": "restart with the new Policy",
    "yields": "restart with the new Policy",
    "deterministic": "restart with the new Policy",
    "exact-steps": "restart with the new Policy",
    "allow-state": "restart with the new Policy",
    "residual": "the saved residuals have the other type; restart with the new Policy",
    "tolerance": "loss bounds by layer are objects of the program; change them there",
    "bucket-size": "DDP makes its buckets at the start; set bucket_cap_mb there",
}
"""Settings that cannot change in a running job, and the remedy."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One change. Numbers grow from change to change of a job."""

    number: int
    name: str
    value: Any

    @staticmethod
    def read(text: bytes) -> Change:
        """The change in a message. Raises ValueError for anything else."""
        found = read(text)
        try:
            return Change(int(found["number"]), str(found["name"]), found["value"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"no change: {error!r}") from error

    def text(self) -> bytes:
        """The change as a message."""
        return json.dumps(dataclasses.asdict(self)).encode()


def parse(name: str, value: str) -> Any:
    """The value of a change from a command line. Raises ConfigError for a change that there is not."""
    if name in REFUSED:
        raise ConfigError(f"{name} cannot change in a running job: {REFUSED[name]}")
    if name not in POLICY and name not in PORTS:
        raise ConfigError(f"{name}: there is no such change; use one of {', '.join([*POLICY, *PORTS])}")
    try:
        return {"loss-bound": float, "priority": int}.get(name, str)(value)
    except ValueError as error:
        raise ConfigError(f"{name} {value}: use a number") from error


class Mailbox:
    """The changes that wait in this process, until each hook has applied them. The agent's thread and those that train
    may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Change] = []
        self._offered_s = 0.0
        self._told = 0
        self.on_applied: Callable[[int, int], None] = lambda number, step: None  # noqa: ARG005
        """It is called once with the number of a change, and the step, when each hook of this process that has begun a
        step since the offer has applied it. A hook that rests (another phase of the training) would be waited for in
        vain; it applies the change when it goes on."""

    def offer(self, change: Change) -> None:
        """All ranks are about to have this change."""
        with self._lock:
            self._waiting.append(change)
            self._offered_s = time.monotonic()

    def drop(self, number: int) -> None:
        """The change will not come about, unless all ranks had it already."""
        with self._lock:
            self._waiting = [change for change in self._waiting if change.number != number]

    def waiting(self, after: int) -> Change | None:
        """The first change that waits and has a number larger than `after`."""
        with self._lock:
            return next((change for change in self._waiting if change.number > after), None)

    def applied(self, change: Change, hook: Any, step: int) -> None:
        """A hook has applied the change before this step."""
        others = [at_s for other, at_s in meter.hooks().items() if other is not hook and other.changed < change.number]
        if not others:
            self.drop(change.number)
        with self._lock:
            is_last = self._told < change.number and all(at_s < self._offered_s for at_s in others)
            if is_last:
                self._told = change.number
        if is_last:
            self.on_applied(change.number, step)


mailbox = Mailbox()
"""The mailbox of this process."""


def check(change: Change) -> str:
    """The reason for which this rank cannot make the change; empty: it can."""
    try:
        parse(change.name, str(change.value))
        hooks = list(meter.hooks())
        if not hooks:
            return "it has no communication hook (HookState) that has made a step"
        if change.name in PORTS:
            check_port(change.name, str(change.value))
        for hook in hooks:
            hook.changed_policy(policy_fields(change))
    except (CommError, TypeError) as error:
        return str(error)
    return ""


def policy_fields(change: Change) -> Mapping[str, Any]:
    """The fields of a policy that a change sets."""
    return {POLICY[change.name]: change.value} if change.name in POLICY else {}


def check_port(name: str, interface: str) -> None:
    """Raises ConfigError unless this process has the interface, and another one that is not paused."""
    engine = Engine.current()
    names = [] if engine is None else engine.ports.names()
    if interface not in names:
        raise ConfigError(f"{name} {interface}: its interfaces are {', '.join(names) or 'none'}")
    paused = set() if engine is None else engine.routes.paused
    if name == "pause" and not set(names) - paused - {interface}:
        raise ConfigError(f"pause {interface}: no other interface would be left")


def apply_port(change: Change) -> None:
    """Pauses or resumes the paths of an interface."""
    engine = Engine.current()
    if engine is not None and change.name in PORTS:
        engine.routes.pause(str(change.value), is_paused=change.name == "pause")
