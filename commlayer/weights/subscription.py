"""`subscribe`: a reader of published weights (`publisher.py`)."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import ClosedError, CommError, ConfigError, MismatchError, PeerLostError, UnreachableError
from . import content
from .answer import Arrival
from .held import Held, Pool
from .intake import Intake, Question
from .layout import Layout, State, marks, overlaps, tensors_of
from .message import Head, key_and_endpoint

LOOK_S = 0.5
"""Longest sleep: Ctrl-C and lost connections are noticed after it."""

REFUSALS = 3
"""So many handshakes that fail, and none that succeeds: the secret is another one."""


class Version:
    """A version of the published state, complete and checked. It can be applied until the next one is asked for."""

    def __init__(self, owner: Subscription, held: Held, received_bytes: int, *, is_whole: bool) -> None:
        self._owner = owner
        self._held = held
        self.number = held.version
        """That of `commit`."""
        self.digest = held.digest
        """32 hex digits: equal states have equal ones."""
        self.received_bytes = received_bytes
        """Bytes of the content that brought it, and of the layout if that came, too."""
        self.is_whole = is_whole
        """Whether that was the whole state, not a difference."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, in CPU memory. They are not copies: do not change them, and clone what outlives the
        next version. Raises ClosedError if that was asked for."""
        self._owner._check_held(self._held)
        return self._held.layout.views(self._held.memory)

    def apply(self, model: State) -> None:
        """Copies this version into a model, or into a dict of tensors: all of it, or, after an error, nothing.

        Raises MismatchError, which names the tensors, if the model has others, or if two of its tensors share memory
        and their values here differ; ConfigError for a model whose state_dict() has copies; ClosedError if the next
        version was asked for meanwhile.
        """
        self._owner._apply(self._held, model)


class Subscription:
    """Made by `subscribe`: an iterator over versions. It holds the latest one, also while the publisher is away."""

    def __init__(self, address: str, secret_file: str | None, timeout_s: float, serves: bool) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s}: use a number of seconds above 0")
        self._address, self._timeout_s = address, timeout_s
        key, endpoint = key_and_endpoint(address, secret_file)
        self._intake = Intake(address, key, endpoint, serves=serves)
        self._end = weakref.finalize(self, self._intake.close)
        self._is_closed = False
        self.is_ended = False
        """Whether the publisher has closed: no version follows."""
        self._is_waiting = False
        """Whether it waits for the answer to the last question."""
        self._has_doubts = False
        """A difference did not lead to its digest: the next question is for the whole state."""
        self._pool: Pool | None = None
        """Blocks for versions of the layout that is held."""
        self._life = ""
        self._held: Held | None = None
        self._before: Held | None = None
        """The version before, with which a failed `apply` is undone."""
        self._applied: tuple[weakref.ref[Any], Held, list[tuple[int, int]]] | None = None
        """A model, the version that was copied into it last, and its marks after that."""

    # ---- what users call ----

    def __iter__(self) -> Iterator[Version]:
        return self

    def __next__(self) -> Version:
        """The next version that the publisher has. Ends when the publisher has closed. Errors: see `latest`."""
        found = self._next(None)
        if found is None:
            raise StopIteration
        return found

    def latest(self, wait_s: float = 0.0) -> Version | None:
        """A version that this reader does not have yet, after at most `wait_s`; None: there is none, or the publisher
        has closed (`is_ended`).

        Raises PeerLostError if the publisher has been away for `timeout_s`, or if three connections ended within a
        version (the next call waits for it again, and nothing that is held gets lost); UnreachableError if it never was
        there; ConfigError if it has another secret; MismatchError if the publisher began anew with another state, or at
        a version that this reader has passed; CommError for content that is damaged; ClosedError after `close`.
        """
        return self._next(wait_s)

    @property
    def version(self) -> int | None:
        """The number of the version that this reader holds."""
        return None if self._held is None else self._held.version

    def close(self) -> None:
        """Ends the connection."""
        self._is_closed = True
        self._end()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- messages ----

    def _next(self, wait_s: float | None) -> Version | None:
        if self._is_closed:
            raise ClosedError(f"the subscription to {self._address} is closed; subscribe anew")
        until_s = None if wait_s is None else time.monotonic() + wait_s
        while not self.is_ended:
            self._ask()
            limits_s, link = [time.monotonic() + LOOK_S], self._intake.link
            limits_s += [] if until_s is None else [until_s]
            limits_s += [] if link.is_up else [link.away_since_s + self._timeout_s]
            for event in self._intake.event(min(limits_s) - time.monotonic()):
                if event is None:
                    self.is_ended = True
                    return None
                self._is_waiting = False
                if isinstance(event, BaseException):
                    raise event
                return self._take(event)
            link = self._intake.link
            if not link.is_up:
                away_s = time.monotonic() - link.away_since_s
                if away_s >= self._timeout_s or link.refusals >= REFUSALS:
                    self._intake.absent()
                    raise self._absence(away_s)
            if until_s is not None and time.monotonic() >= until_s:
                return None
        return None

    def _ask(self) -> None:
        """Asks for another version than that which is held, unless it has asked."""
        if self._is_waiting:
            return
        held, layout = self._held, "" if self._held is None else self._held.layout.fingerprint
        head = Head(0, layout=layout)
        if held is not None and not self._has_doubts:
            head = Head(0, self._life, held.version, held.digest, layout)
        self._intake.ask(Question(head, held, self._life, self._pool))
        self._is_waiting = True

    def _take(self, arrival: Arrival) -> Version:
        """Checks a version, and only then holds it. If it is damaged, the whole state is asked for."""
        head, held, before = arrival.head, arrival.result(), self._before
        if held is None:
            self._has_doubts = True
            raise CommError(
                f"version {head.version} from {self._address} is damaged: its digest is not {head.digest}; this reader "
                f"holds {self._holding}, and the next call asks for the whole state"
            )
        self._has_doubts = False
        is_same_pool = arrival.pool is self._pool
        self._intake.hold(held, before, self._pool if is_same_pool else None)
        if not is_same_pool and self._held is not None:  # the layout is another one
            self._intake.hold(held, self._held, None)
        self._before = self._held if is_same_pool else None
        self._held, self._life, self._pool = held, head.life, arrival.pool
        return Version(self, held, arrival.received_bytes, is_whole=arrival.is_whole)

    @property
    def _holding(self) -> str:
        return "nothing" if self._held is None else f"version {self._held.version}"

    def _absence(self, away_s: float) -> CommError:
        link = self._intake.link
        if link.was_up:
            return PeerLostError(
                f"the publisher at {self._address} has been away for {away_s:.1f} s; this reader holds "
                f"{self._holding}. Look at the publisher's log; the next call waits for it again"
            )
        if link.refusals >= REFUSALS:
            return ConfigError(
                f"{self._address} answers, but does not accept this reader: its secret is another one, or it is no "
                f"commlayer.publish; use the same secret_file= or COMMLAYER_SECRET_FILE at both"
            )
        return UnreachableError(
            f"no publisher at {self._address} for {away_s:.1f} s; start it, and look for a firewall in between"
        )

    # ---- models ----

    def _check_held(self, held: Held) -> None:
        if held is not self._held:
            raise ClosedError(
                f"version {held.version}: the next one was asked for, so that its memory is gone; apply a version "
                f"before the next"
            )

    def _apply(self, held: Held, model: State) -> None:
        self._check_held(held)
        layout = held.layout
        targets = tensors_of(model)
        layout.check(Layout.of(targets), "here", "at the publisher")
        applied, self._applied = self._applied, None
        is_follower = (
            applied is not None
            and applied[0]() is model
            and applied[1] is self._before
            and applied[2] == marks(targets)  # nobody changed it since
        )
        sources = layout.views(held.memory)
        with torch.no_grad():
            if is_follower and self._before is not None:
                before = layout.views(self._before.memory)
            else:
                before = {name: tensor.clone() for name, tensor in targets.items()}
            done: list[str] = []
            try:
                for name, source in sources.items():
                    done.append(name)
                    targets[name].copy_(source)
                _check_shared(targets, sources)
            except BaseException:
                for name in done:
                    targets[name].copy_(before[name])
                raise
        after = marks(targets)
        if isinstance(model, torch.nn.Module) and after is not None:
            self._applied = (weakref.ref(model), held, after)


def _check_shared(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    """Raises MismatchError unless tensors that share memory have got the values of each."""
    for pair in overlaps(targets):
        first, second = (sources[name] for name in pair)
        if first.data_ptr() == second.data_ptr() and first.shape == second.shape:
            continue
        if not all(content.is_same(targets[name], sources[name]) for name in pair):
            raise MismatchError(
                f"{pair[0]} and {pair[1]} share memory here, but have different values at the publisher; tie the same "
                f"tensors in both models"
            )


def subscribe(
    address: str, *, secret_file: str | None = None, timeout_s: float = 30.0, serves: bool = True
) -> Subscription:
    """The versions that `commlayer.publish` at this address commits: an iterator, which waits for the next one.

        for version in commlayer.subscribe("trainer:29600"):
            version.apply(model)

    A reader that is slow gets the latest version next and skips those between. It comes and goes as it likes. Each
    version was checked against its digest before it is seen. `timeout_s`: after so long without the publisher, an error
    says so; connections are made again by themselves. `secret_file`: as at the publisher. `serves`: this reader and
    others give each other the parts of long versions, so that the publisher sends these once: it listens at a free
    port of the address from which it reaches the publisher. Without that, it gets all from the publisher. A reader
    needs memory for three copies of the state; one that serves also keeps the last difference, and, while another
    reader gets it, a fourth copy. It belongs to one thread, and has one of its own.

    Raises ConfigError for an address that is none, a missing or unreadable secret, and without the package pyzmq.
    Errors of the iteration: see `Subscription.latest`.
    """
    return Subscription(address, secret_file, timeout_s, serves)
