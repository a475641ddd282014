"""`labelled`: the name that operations of a context have in the flight record, and in traces of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_current: ContextVar[str] = ContextVar("commlayer.label", default="")


@contextlib.contextmanager
def labelled(text: str) -> Iterator[None]:
    """Operations that start in this context are called `text`, unless an outer context has named them: `bucket 3`."""
    if _current.get():
        yield
        return
    token = _current.set(text)
    try:
        yield
    finally:
        _current.reset(token)


def current_label() -> str:
    """The name of operations of this context; empty: there is none."""
    return _current.get()
