"""`Bell`: tells the sites that the first of them has begun a turn, so that a slow one begins it, too."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import torch.distributed as dist

from ...transport.store_link import connection

log = logging.getLogger("commlayer")

LOOK_S = 0.01
"""Pause between looks at the Store. torch's own wait would log a warning each time that it ends in vain, and a process
that ends while a thread is in it aborts."""

CLOSE_S = 1.0
"""The longest wait for the end of the thread, where the Store does not answer."""


class Bell:
    """The bell of a group, which has rung for `turn` turns so far. A thread listens, over its own connection to the
    Store, so `rung` costs a step nothing. If the Store is gone, the bell is silent."""

    def __init__(self, store: Any, turn: int, silence_s: float) -> None:
        self._store = dist.PrefixStore("bell", store)
        self._turn, self._silence_s = turn, silence_s
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

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._stopped.set()
        self._thread.join(CLOSE_S)

    def _listen(self) -> None:
        try:
            store = connection(self._store, self._silence_s)
            while not self._stopped.wait(LOOK_S):
                while store.check([str(self._turn)]):
                    self._turn += 1
        except RuntimeError as error:
            log.warning("LocalSteps(uneven=True): the Store is gone, so sites wait for the slowest: %s", error)
