"""A context of zmq, and an outlet on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from commlayer.weights.outlet import Outlet

KEY = bytes(32)


@pytest.fixture
def context() -> Iterator[Any]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def outlet(context: Any) -> Iterator[Outlet]:
    made = Outlet(context, KEY, "tcp://127.0.0.1:0")
    yield made
    made.close()
