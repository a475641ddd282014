"""`Parting`: the ranks of a site end their loops together, after equally many steps.

A rank that ends its loop says so in the Store, and waits for its mates before it exchanges anything with them. One that
makes a further step would wait for it there, in a collective of DDP or FSDP2. A thread of each rank finds that: the
other one has left, and this one has begun collectives since its last step that the other one has not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import CommError, MismatchError
from ...transport.store_link import connection, patience_s

LOOK_S = 0.5
"""Pause between two looks at the Store, in which all ranks of all sites look."""

CLOSE_S = 1.0
"""The thread may take so long to end, besides the answer of a Store that is silent."""

VERDICT, LEFT = "verdict", "left"

log = logging.getLogger("commlayer")


class Parting:
    """That of one rank of a site, which has not begun its loop.

    `store`: a part of the Store that all ranks of the site share. `site`: their numbers; `own` is this one's. `steps`:
    those that it has made. `count`: how many collectives it has begun with the others. `abort` ends those that wait.
    """

    def __init__(
        self,
        store: Any,
        site: Sequence[int],
        own: int,
        steps: int,
        count: Callable[[], int],
        abort: Callable[[], Any],
        silence_s: float,
    ) -> None:
        self._store, self._site, self._own, self._silence_s = store, list(site), own, silence_s
        self._count, self._abort = count, abort
        self._made = steps, count()  # one value, which the thread reads
        self._has_left = False
        self.is_failed = False
        """Whether the thread has found that the loops end after different steps."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-parting", daemon=True)
        self._thread.start()

    def stepped(self, steps: int) -> None:
        """This rank has made so many steps."""
        self._made = steps, self._count()

    def leave(self, tell: Callable[[Any], Sequence[Any]]) -> None:
        """This rank makes no more steps. `tell` gives its argument to all ranks of the site, each of which calls, and
        returns that of each, by place. Raises MismatchError on all of them, if one makes further steps."""
        self._has_left = True
        steps, count = self._made
        with contextlib.suppress(RuntimeError):  # without a Store
            self._store.set(str(self._own), json.dumps([steps, self._count() - count]))
            self._store.set(LEFT, "")
        try:
            told = tell(steps)
        except CommError as error:
            if (found := self.error()) is not None:
                raise found from error
            raise
        self.close()
        if len(set(told)) > 1:
            each = (f"rank {rank} after step {made}" for rank, made in zip(self._site, told, strict=True))
            raise MismatchError(self._text(f"their ranks have left `with`: {', '.join(each)}"))

    def error(self) -> MismatchError | None:
        """That of all ranks of the site, if their loops end after different steps, as one of them has found."""
        with contextlib.suppress(RuntimeError):  # without a Store
            if self._store.check([VERDICT]):
                rank, steps, other = json.loads(self._store.get(VERDICT))
                return MismatchError(
                    self._text(
                        f"rank {rank} has left `with` after step {steps}, and rank {other} makes step {steps + 1}, in "
                        f"which it waits for that one"
                    )
                )
        return None

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S + patience_s(self._silence_s))

    def _text(self, found: str) -> str:
        return (
            f"rank {self._own}: LocalSteps: the loops of one site, ranks {', '.join(map(str, self._site))}, end after "
            f"different steps: {found}; give the ranks of a site equally many steps, as by "
            f"DistributedSampler(drop_last=True), or end their loops by LocalSteps.steps, or by LocalSteps.trained "
            f"with uneven=True"
        )

    def _run(self) -> None:
        try:
            store = connection(self._store, self._silence_s)
            while not self._stopped.wait(LOOK_S):
                if self._look(store):
                    self.is_failed = True
                    self._abort()
                    return
        except RuntimeError as error:
            log.warning("LocalSteps: the Store is gone, so a rank may wait in vain for one that has left: %s", error)

    def _look(self, store: Any) -> bool:
        """Whether a rank of the site makes steps without another one."""
        if store.check([VERDICT]):
            return True
        if self._has_left or not store.check([LEFT]):
            return False
        for rank in self._site:
            if rank != self._own and store.check([str(rank)]):
                steps, count = json.loads(store.get(str(rank)))
                made, before = self._made
                if made > steps or (made == steps and self._count() - before > count):
                    store.compare_set(VERDICT, "", json.dumps([rank, steps, self._own]))
                    return True
        return False
