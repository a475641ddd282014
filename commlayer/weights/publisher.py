"""`publish`: one writer, whose weights many readers follow (`subscription.py`)."""

from __future__ import annotations

import os
import secrets
from multiprocessing.util import Finalize
from types import TracebackType

from ..errors import ClosedError, ConfigError, MismatchError
from .held import Pool
from .layout import Layout, State, tensors_of
from .message import VERSIONS, key_and_endpoint
from .server import Server, raised

EXIT_S = 1.0
"""Longest wait for readers when the process ends without `close`."""


class Publisher:
    """Made by `publish`. `with` closes it at the end of its block; so does the end of the process."""

    def __init__(self, state: State, address: str, secret_file: str | None) -> None:
        self._state = state
        self._address = address
        tensors = tensors_of(state)
        if not tensors:
            raise ConfigError(
                f"publish: the {type(state).__name__} has no tensors; give a model with parameters or buffers, or a "
                f"dict of tensors by name"
            )
        self._layout = Layout.of(tensors)
        self._pool = Pool(self._layout.bytes)
        self._version = -1
        self._pid = os.getpid()
        key, endpoint = key_and_endpoint(address, secret_file, bind=True)
        self._server: Server | None = Server(self._layout, self._pool, key, endpoint, secrets.token_hex(8))
        self._at_exit = Finalize(self, self._server.close, (EXIT_S,), exitpriority=3)

    def commit(self, version: int) -> None:
        """Publishes the values that the state has now, as this version: a number that grows.

        Copies the state (the readers get this copy, whatever happens later) and returns; a thread codes it, another
        sends it. If the coding takes longer than the time to the next commit, the version between is skipped. Call it
        between `optimizer.step()` and the next change of a parameter: a version committed in mid-step is a state in
        mid-step. Steps that `commlayer.overlap` has deferred are made first.

        Raises ConfigError for a version that is no number or does not grow, and if another thread changes parameters
        meanwhile; MismatchError, which names the tensors, if the state has other names, types or shapes than at
        `publish`, or if other tensors of it are tied; ClosedError after `close`, and in a forked child; CommError if a
        thread of the publisher has failed.
        """
        if self._server is None or self._pid != os.getpid():
            raise ClosedError(
                f"commit({version}): the publisher at {self._address} "
                f"{'is closed' if self._server is None else 'belongs to the parent process'}; publish anew"
            )
        raised(self._server.error)
        if type(version) is not int or not 0 <= version < VERSIONS:
            raise ConfigError(f"commit({version!r}): use a whole number from 0, as the step")
        if version <= self._version:
            raise ConfigError(
                f"commit({version}): the last version was {self._version}, and versions grow; a training that goes "
                f"back to a checkpoint closes the publisher and publishes anew, and its readers subscribe anew"
            )
        tensors = tensors_of(self._state)
        try:
            now = Layout.of(tensors)
            self._layout.check(now, "now", "when it was published")
            self._layout.check_ties(now, "now", "when it was published")
        except MismatchError as error:
            raise MismatchError(f"commit({version}): {error}, or publish anew") from None
        memory = self._pool.take()
        try:
            self._layout.take(tensors, memory)
        except BaseException:
            self._pool.give(memory)
            raise
        self._version = version
        self._server.commit(version, memory)

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Waits until the latest commit is coded, for measurements and before `close`. Whether it is."""
        return self._server is not None and self._server.settle(timeout_s)

    def close(self, wait_s: float = 5.0) -> None:
        """Ends it: each reader learns that no version follows, once it holds the latest. It waits at most `wait_s`
        until that one is coded, and as long again for readers to ask for it."""
        server, self._server = self._server, None
        if server is not None and self._pid == os.getpid():
            self._at_exit.cancel()
            server.settle(wait_s)
            server.close(wait_s)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(*(() if kind is None else (0.0,)))


def publish(model: State, address: str, *, secret_file: str | None = None) -> Publisher:
    """Publishes the weights of a model to any number of readers: `publisher.commit(version)` after a step, and in each
    reader `for version in commlayer.subscribe(address): version.apply(model)`.

    `model`: a module, whose parameters and persistent buffers are published, or a dict of tensors by name; dense ones,
    of any device and of floating-point, complex, integer or boolean type. `address`: host:port of this process.
    `secret_file`: a file with a secret of at least 16 bytes, the same at the readers; by default that of
    COMMLAYER_SECRET_FILE. Without a secret, only a loopback address is accepted.

    A reader gets the difference to the version that it holds, coded near its entropy, or the whole state where that is
    shorter; the result has the same bits. After PULSE (arXiv 2602.03839): at the learning rates of reinforcement
    learning, about 1 % of bf16 weights change in a step. The publisher needs memory for up to four copies of the
    state, as much as one more for the differences that it keeps, one more for each older version that is still sent as
    a whole, and some MiB for each reader that it sends to.
    See docs/publish.md.

    Raises ConfigError for an address that is none or is taken, for a missing or unreadable secret, for a state without
    tensors or with other than dense ones, for a model whose state_dict() has copies (an extra state, FSDP's shards),
    and without the package pyzmq.
    """
    return Publisher(model, address, secret_file)
