"""What operations get from the context in which they start: `priority`, their class; `in_order`, their order within it;
`labelled`, their name in the flight record and in traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from ...config import CLASS

ORDER_MAX = (1 << 16) - 1

# Every operation asks for these four: a method of ContextVar takes less time than a function around it.
_priority: ContextVar[int | None] = ContextVar("commlayer.priority", default=None)
current_priority = _priority.get
"""Returns the class of this context; None: there is none."""
_order: ContextVar[int] = ContextVar("commlayer.order", default=0)
current_order = _order.get
"""Returns the place of operations of this context, 0 to ORDER_MAX."""
_label: ContextVar[str] = ContextVar("commlayer.label", default="")
current_label = _label.get
"""Returns the name of operations of this context; empty: there is none."""


class NeedsHostError(Exception):
    """An operation would need the host between its words. Nothing has started: it can start without words."""


class Words(NamedTuple):
    """The words of an operation whose tensors are pinned copies: a device opens the gate, and waits for `done`."""

    gate: int
    """See `base.Request`."""
    done: int
    memory: frozenset[int]
    """The addresses of the copies. Only the engine may read or write them between the words: the device has not made
    them when the operation is submitted, and reads them as soon as it is done."""

    def check(self, *addresses: int) -> None:
        """Raises NeedsHostError if an operation on this memory is one on copies of the copies."""
        if not self.memory.issuperset(addresses):
            raise NeedsHostError


_words: ContextVar[Words | None] = ContextVar("commlayer.words", default=None)
current_words = _words.get
"""Returns the words of the operation that starts in this context; None: it has none."""


AHEAD = 2
"""The class of short exchanges that go ahead of gradients. Classes 0 and 1 are more urgent. But for a second after an
operation of theirs the engine keeps the gradients' queues and its own naps short, which costs some of the link."""


@contextlib.contextmanager
def priority(n: int) -> Iterator[None]:
    """Operations that start in this context have class `n`, 0 (most urgent) to 7.

        with commlayer.priority(0):
            dist.all_reduce(tensor)

    It holds for every collective and send of every commlayer group, whoever calls it: funcol, DTensor, FSDP2,
    pipelining. All ranks must use the same class for a collective. Of a message only the sender's class counts.

    The class of the context replaces that of the group's policy, `yields` included. An operation with a policy of its
    own (`policy=`, and thus the buckets of a HookState and the collectives of compress_fsdp) keeps the class of that
    policy. The innermost context counts.

    A context belongs to its thread, as any ContextVar does: threads begin without one. Autograd runs the backward pass
    of CPU tensors in the thread that calls `backward()`, and that of CUDA tensors in a thread of its own, which is
    outside the context. Also usable as a decorator.

    Raises ConfigError, which names the value, for any other `n`.
    """
    token = _priority.set(CLASS.check(n, f"priority({n!r})"))
    try:
        yield
    finally:
        _priority.reset(token)


@contextlib.contextmanager
def in_order(place: int) -> Iterator[None]:
    """Operations that start in this context go, between hosts and within their class, before those of a larger `place`.

    Operations outside of any such context have place 0. Those of the same place go in the order of their start. It
    need not be the same on all ranks.
    """
    token = _order.set(min(place, ORDER_MAX))
    try:
        yield
    finally:
        _order.reset(token)


@contextlib.contextmanager
def labelled(text: str) -> Iterator[None]:
    """Operations that start in this context are called `text`, unless an outer context has named them: `bucket 3`."""
    if _label.get():
        yield
        return
    token = _label.set(text)
    try:
        yield
    finally:
        _label.reset(token)


def hold_words(words: Words) -> None:
    """The operation that starts in this context has these words."""
    _words.set(words)
