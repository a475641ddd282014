"""The plans a group has used, to be used again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import ParamSpec

from .plan import Plan

P = ParamSpec("P")

LIMIT_BYTES = 32 << 20
"""Limit of memory for a group's plans here; the engine's copies take as much again."""

PLAN_BYTES = 2 << 10
"""Approximate memory of a plan beside its steps."""


class PlanCache:
    """Plans by key. The oldest go first: a job whose sizes never repeat must not grow."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._plans: dict[Hashable, Plan] = {}
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan for `key`, made if it is missing. A plan larger than the limit is kept alone."""
        plan = self._plans.get(key)
        return self.add(key, make()) if plan is None else plan

    def find(self, key: Hashable) -> Plan | None:
        """The plan for `key`; None if it is missing. Small collectives have no time to make a function for `get`."""
        return self._plans.get(key)

    def over(self, make: Callable[P, Plan]) -> Callable[P, Plan]:
        """`make`, whose plans are kept here by its arguments, which are hashable."""

        @functools.wraps(make)
        def cached(*args: P.args, **named: P.kwargs) -> Plan:
            return self.get((args, *sorted(named.items())), lambda: make(*args, **named))

        return cached

    def __len__(self) -> int:
        return len(self._plans)

    def clear(self) -> None:
        """Forgets all plans."""
        with self._lock:
            self._plans.clear()
            self._bytes = 0

    def add(self, key: Hashable, plan: Plan) -> Plan:
        """Keeps a plan that was missing, and returns it, or that of a thread that was faster."""
        with self._lock:
            if key in self._plans:
                return self._plans[key]
            self._bytes += _size_bytes(plan)
            while self._plans and self._bytes > self._limit_bytes:
                self._bytes -= _size_bytes(self._plans.pop(next(iter(self._plans))))
            self._plans[key] = plan
        return plan


def _size_bytes(plan: Plan) -> int:
    return PLAN_BYTES + plan.steps.nbytes + plan.successors.nbytes
