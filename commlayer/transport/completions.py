"""`Completions`: the threads that run callbacks when operations end."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

log = logging.getLogger("commlayer")

IDLE = 2
"""Threads that stay while they have nothing to do."""


class Completions:
    """Calls back when operations end.

    A callback may start another operation and wait for its future, as torch's PowerSGD hook does. So while one thread
    runs a callback, another one always waits for the next operation to end.

    `wait` blocks until operations have ended and returns their tokens and statuses; after `stop`, once there are no
    more, it returns None. One thread at a time calls it.
    """

    def __init__(self, wait: Callable[[], Iterable[tuple[int, int]] | None], stop: Callable[[], None]) -> None:
        self._wait = wait
        self._stop = stop
        self._tokens = itertools.count(1)
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._ended: deque[tuple[int, int]] = deque()
        self._turn = threading.Lock()
        """Held by the thread that waits."""
        self._guard = threading.Lock()
        """Guards the fields below."""
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    def expect(self, callback: Callable[[int], None]) -> int:
        """Returns a token for an operation; `callback` is called with the status of that operation."""
        with self._guard:
            if not self._threads and not self._closed:
                self._start()
        token = next(self._tokens)
        self._callbacks[token] = callback
        return token

    def forget(self, token: int) -> None:
        """Cancels `expect`."""
        del self._callbacks[token]

    def close(self) -> None:
        """Ends the threads once all callbacks have run, except the calling thread if it is one of them."""
        self._stop()
        while others := self._others():
            for thread in others:
                thread.join()
        with self._guard:
            self._closed = True

    def _others(self) -> set[threading.Thread]:
        with self._guard:
            return self._threads - {threading.current_thread()}

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="commlayer-completions", daemon=True)
        self._threads.add(thread)
        self._idle += 1
        thread.start()

    def _run(self) -> None:
        while ended := self._next():
            with self._guard:
                self._idle -= 1
                if self._idle == 0 and not self._closed:
                    self._start()
            token, status = ended
            try:
                self._callbacks.pop(token)(status)
            except Exception:
                log.exception("a completion callback raised")
            with self._guard:
                if self._idle >= IDLE or self._closed:
                    break
                self._idle += 1
        with self._guard:
            self._threads.discard(threading.current_thread())

    def _next(self) -> tuple[int, int] | None:
        with self._turn:
            while not self._ended:
                more = self._wait()
                if more is None:
                    return None
                self._ended.extend(more)
            return self._ended.popleft()
