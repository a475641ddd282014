"""`subscribe`: a reader of published weights (`publisher.py`)."""

from __future__ import annotations

import importlib
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import ClosedError, CommError, ConfigError, MismatchError, PeerLostError, UnreachableError
from ..telemetry import curve
from ..transport.log import log
from . import content
from .answer import Arrival
from .held import Held, Pool
from .layout import Layout, State, marks, overlaps, tensors_of
from .message import ANSWER_MAX_BYTES, ASK, END, PART, Head, key_and_endpoint, tuned

LOOK_S = 0.5
"""Longest sleep: Ctrl-C and lost connections are noticed after it."""

REFUSALS = 3
"""So many handshakes that fail, and none that succeeds: the secret is another one."""

BREAKS = 3
"""So many connections that end within a version, and none that brings one: an error says so."""

AGAIN_S = 0.01
"""Time between two tries to ask, when a connection has just begun."""

RECONNECT_MOST_MS = 2000


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

    def __init__(self, address: str, secret_file: str | None, timeout_s: float) -> None:
        zmq = curve.load()
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s}: use a number of seconds above 0")
        self._address, self._timeout_s = address, timeout_s
        key, endpoint = key_and_endpoint(address, secret_file)
        self._context = zmq.Context()
        self._socket = tuned(curve.client(self._context, key, ANSWER_MAX_BYTES))
        self._socket.rcvhwm = 0  # an answer comes while the reader does other work
        # Not `immediate`: with that, libzmq drops what has come when a connection ends, as the last message of all.
        self._socket.reconnect_ivl_max = RECONNECT_MOST_MS
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._failed = failed | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._news = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED | self._failed
        )
        self._socket.connect(endpoint)
        self._is_closed = self._is_ended = False
        self._is_linked = self._was_linked = False
        self._refusals = 0
        self._away_since_s = time.monotonic()
        """While there is no connection."""
        self._is_waiting = False
        """Whether it waits for the answer to the last question."""
        self._has_doubts = False
        """A difference did not lead to its digest: the next question is for the whole state."""
        self._breaks = 0
        """Connections that ended within a version, since the last complete one."""
        self._asked = 0
        self._arrival: Arrival | None = None
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
        has closed.

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
        if not self._context.closed:
            self._socket.disable_monitor()
            self._context.destroy(linger=0)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- messages ----

    def _next(self, wait_s: float | None) -> Version | None:
        if self._is_closed:
            raise ClosedError(f"the subscription to {self._address} is closed; subscribe anew")
        zmq = curve.load()
        poller = zmq.Poller()
        for socket in (self._socket, self._news):
            poller.register(socket, zmq.POLLIN)
        begin_s = time.monotonic()
        while not self._is_ended:
            self._look()
            is_asked = self._ask()
            while self._socket.poll(0):
                found = self._hear(self._socket.recv_multipart(copy=False))
                if found is not None or self._is_ended:
                    return found
            now_s = time.monotonic()
            if not self._is_linked:
                away_s = now_s - self._away_since_s
                if away_s >= self._timeout_s or self._refusals >= REFUSALS:
                    self._away_since_s = now_s
                    raise self._absence(away_s)
            left_s = LOOK_S if wait_s is None else min(LOOK_S, begin_s + wait_s - now_s)
            if left_s <= 0:
                return None
            poller.poll(1e3 * min(left_s, LOOK_S if is_asked else AGAIN_S))
        return None

    def _look(self) -> None:
        """Follows the connection."""
        zmq = curve.load()
        parse = importlib.import_module("zmq.utils.monitor").parse_monitor_message
        while self._news.poll(0):
            event = parse(self._news.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_linked, self._was_linked, self._is_waiting, self._refusals = True, True, False, 0
            elif event == zmq.EVENT_CONNECTED:
                self._refusals += not self._was_linked
            elif self._is_linked:
                self._is_linked, self._away_since_s = False, time.monotonic()

    def _ask(self) -> bool:
        """Asks for another version than that which is held, unless it has asked. False: it must try again soon."""
        if self._is_waiting or not self._is_linked:
            return True
        zmq = curve.load()
        if self._arrival is not None:
            version, self._arrival = self._arrival.head.version, None
            self._breaks += 1
            log.warning("the connection to %s ended within version %d: asking anew", self._address, version)
            if self._breaks >= BREAKS:
                self._breaks = 0
                raise PeerLostError(
                    f"the connection to {self._address} ended {BREAKS} times within a version, at last "
                    f"{version}; this reader holds {self._holding}. Look at the link: it must carry 64 kB/s and stay "
                    f"for as long as a version takes; the next call asks again"
                )
        held, layout = self._held, "" if self._held is None else self._held.layout.fingerprint
        head = Head(self._asked + 1, layout=layout)
        if held is not None and not self._has_doubts:
            head = Head(self._asked + 1, self._life, held.version, held.digest, layout)
        try:
            self._socket.send_multipart([ASK, head.text()], flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._asked += 1
        self._is_waiting = True
        return True

    def _hear(self, frames: list[Any]) -> Version | None:
        """The version that a message completes. None: there is none, or it is one of an earlier answer, or the end. It
        must keep no frame."""
        arrival, self._arrival = self._arrival, None
        try:
            kind, text, part = [frame.buffer for frame in frames]
            kind = bytes(kind)
            if kind == PART:
                if arrival is None:
                    return None
                arrival.add(bytes(text), part)
            else:
                head = Head.read(bytes(text))
                self._is_ended = kind == END
                if kind == END or head.request != self._asked:
                    return None
                arrival = self._begun(kind, head)
            if arrival.is_complete:
                return self._take(arrival)
            self._arrival = arrival
        except BaseException as error:
            self._is_waiting = False  # it asks again
            if not isinstance(error, ValueError) or isinstance(error, CommError):
                raise
            raise CommError(
                f"{self._address} sent a message that is damaged, or of another release: {error}; use one release of "
                f"commlayer"
            ) from error
        return None

    def _begun(self, kind: bytes, head: Head) -> Arrival:
        """An answer that begins."""
        if self._held is not None and head.life != self._life and head.version <= self._held.version:
            raise MismatchError(
                f"the publisher at {self._address} began anew, at version {head.version}; this reader holds "
                f"{self._held.version} of its former life, and versions grow; subscribe anew to go back"
            )
        arrival = Arrival(kind, head, self._held, self._pool)
        if not arrival.is_whole and (self._held is None or (head.life, head.base) != (self._life, self._held.version)):
            raise ValueError(f"a difference to version {head.base}")
        return arrival

    def _take(self, arrival: Arrival) -> Version:
        """Checks a version, and only then holds it. If it is damaged, the whole state is asked for."""
        self._is_waiting = False
        head, held, before = arrival.head, arrival.result(), self._before
        if held is None:
            self._has_doubts = True
            raise CommError(
                f"version {head.version} from {self._address} is damaged: its digest is not {head.digest}; this reader "
                f"holds {self._holding}, and the next call asks for the whole state"
            )
        self._has_doubts, self._breaks = False, 0
        if arrival.pool is self._pool and self._pool is not None and before is not None:
            self._pool.give(before.memory)
        self._before = self._held if arrival.pool is self._pool else None  # the layout is another one
        self._held, self._life, self._pool = held, head.life, arrival.pool
        return Version(self, held, head.layout_bytes + head.code_bytes, is_whole=arrival.is_whole)

    @property
    def _holding(self) -> str:
        return "nothing" if self._held is None else f"version {self._held.version}"

    def _absence(self, away_s: float) -> CommError:
        if self._was_linked:
            return PeerLostError(
                f"the publisher at {self._address} has been away for {away_s:.1f} s; this reader holds "
                f"{self._holding}. Look at the publisher's log; the next call waits for it again"
            )
        if self._refusals >= REFUSALS:
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


def subscribe(address: str, *, secret_file: str | None = None, timeout_s: float = 30.0) -> Subscription:
    """The versions that `commlayer.publish` at this address commits: an iterator, which waits for the next one.

        for version in commlayer.subscribe("trainer:29600"):
            version.apply(model)

    A reader that is slow gets the latest version next and skips those between. It comes and goes as it likes. Each
    version was checked against its digest before it is seen. `timeout_s`: after so long without the publisher, an error
    says so; connections are made again by themselves. `secret_file`: as at the publisher. A reader needs memory for
    three copies of the state, and for one more answer while it is busy. It belongs to one thread.

    Raises ConfigError for an address that is none, a missing or unreadable secret, and without the package pyzmq.
    Errors of the iteration: see `Subscription.latest`.
    """
    return Subscription(address, secret_file, timeout_s)
