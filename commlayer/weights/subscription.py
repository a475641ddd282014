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
from . import content
from .held import Held, Pool
from .layout import Layout, State, tensors_of
from .message import ASK, DIFFERENCE, END, WHOLE, Head, key_and_endpoint, tuned

LOOK_S = 0.5
"""Longest sleep: Ctrl-C and lost connections are noticed after it."""

REFUSALS = 3
"""So many handshakes that fail, and none that succeeds: the secret is another one."""

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
        """Bytes of the message that brought it."""
        self.is_whole = is_whole
        """Whether that was the whole state, not a difference."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, in CPU memory. They are not copies: do not change them, and clone what outlives the
        next version. Raises ClosedError if that was asked for."""
        return self._owner._layout_of(self._held).views(self._held.memory)

    def apply(self, model: State) -> None:
        """Copies this version into a model, or into a dict of tensors: all of it, or, after an error, nothing.

        Raises MismatchError, which names the tensors, if the model has others; ClosedError if the next version was
        asked for meanwhile.
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
        self._socket = tuned(curve.client(self._context, key))
        self._socket.maxmsgsize = -1  # a whole state has any size
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
        """For the answer to the last question."""
        self._has_doubts = False
        """A difference did not lead to its digest: the next question is for the whole state."""
        self._asked = 0
        self._layout: Layout | None = None
        self._pool: Pool | None = None
        self._life = ""
        self._held: Held | None = None
        self._before: Held | None = None
        """The version before, with which a failed `apply` is undone."""
        self._applied: tuple[weakref.ref[Any], Held] | None = None

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

        Raises PeerLostError if the publisher has been away for `timeout_s` (the next call waits for it again, and
        nothing that is held gets lost); UnreachableError if it never was there; ConfigError if it has another secret;
        MismatchError if the publisher began anew with another state, or at a version that this reader has passed;
        CommError for content that is damaged; ClosedError after `close`.
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
        for each in (self._socket, self._news):
            poller.register(each, zmq.POLLIN)
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
        held, layout = self._held, "" if self._layout is None else self._layout.fingerprint
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
        """The version of an answer; None for one to an earlier question, and at the end. It must keep no frame."""
        try:
            kind, text, layout, code = [each.buffer for each in frames]
            kind, head = bytes(kind), Head.read(bytes(text))
            if kind == END:
                self._is_ended = True
            if kind == END or head.request != self._asked:
                return None
            self._is_waiting = False
            if kind not in (WHOLE, DIFFERENCE):
                raise ValueError(f"a message of kind {kind!r:.40}")
            return self._take(head, bytes(layout), code, is_whole=kind == WHOLE)
        except ValueError as error:
            if isinstance(error, CommError):
                raise
            raise CommError(
                f"{self._address} sent a message that is damaged, or of another release: {error}; use one release of "
                f"commlayer"
            ) from error

    def _take(self, head: Head, layout_text: bytes, code: memoryview, *, is_whole: bool) -> Version | None:
        """Makes the version in memory of its own, checks it, and only then holds it. None: it was damaged, and the
        whole state is asked for."""
        if self._held is not None and head.life != self._life and head.version <= self._held.version:
            raise MismatchError(
                f"the publisher at {self._address} began anew, at version {head.version}; this reader holds "
                f"{self._held.version} of its former life, and versions grow; subscribe anew to go back"
            )
        layout = self._layout
        if layout is None or layout.fingerprint != head.layout:
            found = Layout.read(layout_text)
            if found.fingerprint != head.layout:
                raise ValueError("its layout is another one than it says")
            if layout is not None:
                layout.check(found, "now", "before")
            layout = found
        if is_whole and len(code) != layout.bytes:
            raise ValueError(f"{len(code)} bytes of a state of {layout.bytes}")
        if layout is not self._layout or self._pool is None:
            self._layout, self._pool = layout, Pool(layout.bytes)
        memory = self._pool.take()
        is_good = True
        if is_whole:
            content.copy(memory, code)
        else:
            if self._held is None or head.life != self._life or head.base != self._held.version:
                raise ValueError(f"a difference to version {head.base}")
            content.copy(memory, self._held.memory)
            is_good = content.apply(layout, memory, code)
        if not is_good or content.digest(layout, memory) != head.digest:
            self._pool.give(memory)
            self._has_doubts = True
            raise CommError(
                f"version {head.version} from {self._address} is damaged: its digest is not {head.digest}; this reader "
                f"holds {self._holding}, and the next call asks for the whole state"
            )
        self._has_doubts = False
        if self._before is not None:
            self._pool.give(self._before.memory)
        self._before, self._held, self._life = self._held, Held(head.version, head.digest, memory), head.life
        return Version(self, self._held, sum(map(len, (code, layout_text))), is_whole=is_whole)

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

    def _layout_of(self, held: Held) -> Layout:
        if held is not self._held or self._layout is None:
            raise ClosedError(
                f"version {held.version}: the next one was asked for, so that its memory is gone; apply a version "
                f"before the next"
            )
        return self._layout

    def _apply(self, held: Held, model: State) -> None:
        layout = self._layout_of(held)
        targets = tensors_of(model)
        layout.check(Layout.of(targets), "here", "at the publisher")
        is_follower = self._applied is not None and self._applied[0]() is model and self._applied[1] is self._before
        with torch.no_grad():
            if is_follower and self._before is not None:
                before = layout.views(self._before.memory)
            else:
                before = {name: each.clone() for name, each in targets.items()}
            done: list[str] = []
            try:
                for name, source in layout.views(held.memory).items():
                    done.append(name)
                    targets[name].copy_(source)
            except BaseException:
                for name in done:
                    targets[name].copy_(before[name])
                raise
        self._applied = (weakref.ref(model), held) if isinstance(model, torch.nn.Module) else None


def subscribe(address: str, *, secret_file: str | None = None, timeout_s: float = 30.0) -> Subscription:
    """The versions that `commlayer.publish` at this address commits: an iterator, which waits for the next one.

        for version in commlayer.subscribe("trainer:29600"):
            version.apply(model)

    A reader that is slow gets the latest version next and skips those between. It comes and goes as it likes. Each
    version was checked against its digest before it is seen. `timeout_s`: after so long without the publisher, an error
    says so; connections are made again by themselves. `secret_file`: as at the publisher. A reader needs memory for
    three copies of the state. It belongs to one thread.

    Raises ConfigError for an address that is none, a missing or unreadable secret, and without the package pyzmq.
    Errors of the iteration: see `Subscription.latest`.
    """
    return Subscription(address, secret_file, timeout_s)
