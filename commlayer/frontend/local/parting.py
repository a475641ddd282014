"""`Parting`: the ranks of a site end their loops together, after equally many steps.

A rank that ends its loop says so in the Store, and waits for its mates before it exchanges anything with them. One that
makes a further step would wait for it there, in a collective of DDP or FSDP2. A thread of each rank finds that: another
one has left after as many steps, and this one has begun a forward pass of training since, which that one had not.

What ranks exchange besides says nothing: some evaluate, save and send without the others. A loop that calls a part of
its model instead of the model is not found, and waits until the timeout of its group.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

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
    those that it has made. `model`: its forward passes are watched. `abort` ends the collectives of the site.
    """

    def __init__(
        self,
        store: Any,
        site: Sequence[int],
        own: int,
        steps: int,
        model: nn.Module,
        abort: Callable[[], Any],
        silence_s: float,
    ) -> None:
        self._store, self._site, self._own, self._silence_s = store, list(site), own, silence_s
        self._abort = abort
        self._at = steps, False  # one value, which the thread reads: the steps, and whether a pass has begun since
        self._has_left = False
        self.is_failed = False
        """Whether the thread has found that the loops end after different steps."""
        # Before the hook of FSDP2, which waits for the others.
        self._hook = model.register_forward_pre_hook(self._pass_begins, prepend=True)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-parting", daemon=True)
        self._thread.start()

    def _pass_begins(self, model: nn.Module, _: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._at = self._at[0], True

    def stepped(self, steps: int) -> None:
        """This rank has made so many steps."""
        self._at = steps, False

    def leave(self, tell: Callable[[Any], Sequence[Any]]) -> None:
        """This rank makes no more steps. `tell` gives its argument to all ranks of the site, each of which calls, and
        returns that of each, by place. Raises MismatchError on all of them, if one makes further steps."""
        self._has_left = True
        self._hook.remove()
        steps, is_in_pass = self._at
        with contextlib.suppress(RuntimeError):  # without a Store
            self._store.compare_set(LEFT, "", json.dumps([self._own, steps, is_in_pass]))
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
        self._hook.remove()
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
                    break
        except RuntimeError as error:
            log.warning("LocalSteps: the Store is gone, so a rank may wait in vain for one that has left: %s", error)
        if self.is_failed and not self._stopped.is_set():
            self._abort()

    def _look(self, store: Any) -> bool:
        """Whether a rank of the site makes steps without another one. The first that has left decides: all have made as
        many steps as it, or they have made them without collectives."""
        if not store.check([LEFT]):
            return False
        if store.check([VERDICT]):
            return True
        rank, steps, was_in_pass = json.loads(store.get(LEFT))
        made, is_in_pass = self._at
        if self._has_left or not (made > steps or (made == steps and is_in_pass and not was_in_pass)):
            return False
        if not self._stopped.is_set():  # the answers of the Store may have come late
            store.compare_set(VERDICT, "", json.dumps([rank, steps, self._own]))
        return True
