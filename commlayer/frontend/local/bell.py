"""`Bell`: tells the sites that the first of them has begun a turn, so that a slow one begins it, too."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ...transport.store_link import connection, patience_s

log = logging.getLogger("commlayer")

LOOK_S = 0.01
"""Pause between looks at the Store. torch's own wait would log a warning each time that it ends in vain, and a process
that ends while a thread is in it aborts."""

CLOSE_S = 1.0
"""The longest wait for the end of a thread that only looks, where the Store does not answer."""


class Bell:
    """The bell of a group, which has rung for `turn` turns so far. A thread listens, over its own connection to the
    Store, so `rung` costs a step nothing. If the Store is gone, the bell is silent."""

    def __init__(
        self, store: Any, turn: int, silence_s: float, then: Callable[[Bell, Any], None] | None = None
    ) -> None:
        """`then` is called in the thread after each look, with the thread's connection to the Store. It raises
        nothing but errors of the Store."""
        self._store = dist.PrefixStore("bell", store)
        self._turn, self._silence_s, self._then = turn, silence_s, then
        self._heard_s: dict[int, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="commlayer-bell", daemon=True)
        self._thread.start()

    def ring(self, turn: int) -> None:
        """This site begins the turn."""
        with contextlib.suppress(RuntimeError):
            self._store.set(str(turn), "")

    def rung(self, turn: int) -> bool:
        """Whether a site has begun the turn."""
        return self._turn > turn

    def late_s(self, turn: int) -> float:
        """The time since a site has begun the turn, as far as it was heard; 0: not yet."""
        return time.monotonic() - self._heard_s[turn] if self.rung(turn) and turn in self._heard_s else 0.0

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S if self._then is None else CLOSE_S + patience_s(self._silence_s))

    def _listen(self) -> None:
        try:
            store = connection(self._store, self._silence_s)
            while not self._stopped.wait(LOOK_S):
                while store.check([str(self._turn)]):
                    self._heard_s = {self._turn: time.monotonic()}
                    self._turn += 1
                if self._then is not None:
                    self._then(self, store)
        except RuntimeError as error:
            log.warning("LocalSteps: the Store is gone, so sites wait for the slowest: %s", error)
