"""`Refusal`: the hook by which a model within `with LocalSteps` refuses `load_state_dict`. Copies of it do not."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

from ...errors import ConfigError


class Refusal:
    """Refuses as long as `owner`, the LocalSteps, lives. Where a model is copied or pickled, its hooks are, too: the
    copy has a function instead that does nothing."""

    __slots__ = ("_owner",)  # torch copies the `__dict__` of a hook

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self, *_: Any) -> None:
        """Raises ConfigError."""
        if self._owner() is not None:
            raise ConfigError(
                "load_state_dict of a model within `with LocalSteps(...)`: the sites would count it as learned; end "
                "`with` first, or restore before it begins"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # `audit` takes any arguments, and is Python's: a pickled model may be loaded where commlayer is not installed.
        return functools.partial, (sys.audit, "load_state_dict of a copied model")
