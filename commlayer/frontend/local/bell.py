"""`Bell`: tells the sites that the first of them has begun a turn, so that a slow one begins it, too."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...transport.store_link import connection

WAIT_S = 1.0
"""The thread looks so often whether it is to end."""


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

    def _listen(self) -> None:
        store = connection(self._store, self._silence_s)
        while not self._stopped.is_set():
            try:
                store.wait([str(self._turn)], timedelta(seconds=WAIT_S))
            except dist.DistStoreError:  # the time is up
                continue
            except RuntimeError:
                return
            self._turn += 1
