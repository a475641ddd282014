from __future__ import annotations

import pytest

from commlayer.errors import ConfigError

from .world import World, flat


@pytest.fixture
def libfabric() -> None:
    """Skips where the ofi wire cannot be opened."""
    try:
        World(flat(1), "ofi").engines[0].close()
    except ConfigError as error:
        if "libfabric is not available" not in str(error):
            raise
        pytest.skip(str(error))
