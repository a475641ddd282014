"""`Replaced`: attributes of objects that others own, replaced until `restore`."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Replaced:
    """Remembers what each object itself had: nothing, mostly, as methods are those of its class."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Gives `owner` another attribute."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        vars(owner)[name] = value

    def restore(self) -> None:
        """Gives the owners back what they had, the latest first; idempotent."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = value
